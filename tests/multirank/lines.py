"""Collects what all ranks log."""

import logging


class Lines(logging.Handler):
    """The lines that are logged while it is entered."""

    def __enter__(self):
        self.mine = []
        logging.getLogger("hvdplus").addHandler(self)
        return self

    def emit(self, record):
        self.mine.append(record.getMessage())

    def __exit__(self, *error):
        logging.getLogger("hvdplus").removeHandler(self)

    def of_all(self, hvd):
        """Those of all ranks."""
        return [line for lines in hvd.allgather_object(self.mine) for line in lines]
