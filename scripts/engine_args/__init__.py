"""What each vLLM release's command line, environment and metrics are called, captured from the releases themselves."""

from scripts.engine_args.history import History
from scripts.engine_args.vocabulary import PINNED, Engine, Flag, Metric, UnknownReleaseError, load, release

__all__ = ["PINNED", "Engine", "Flag", "History", "Metric", "UnknownReleaseError", "load", "release"]
