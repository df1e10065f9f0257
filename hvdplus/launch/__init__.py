"""Starting ranks: from what is found at a site to the one launcher line that works there."""
