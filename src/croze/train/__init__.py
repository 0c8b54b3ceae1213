"""Training: the ``Trainer`` protocol, algorithms, and the built-in trainer. ``croze.train(run)`` trains a run.

Calling the package is calling ``croze.loop.start.train``; see there for arguments, events and errors.
"""

from croze._verb import callable_package

callable_package(__name__, "croze.loop.start", "train")
