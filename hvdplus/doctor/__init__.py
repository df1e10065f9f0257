"""What is right and wrong on a machine, each finding with its fix."""
