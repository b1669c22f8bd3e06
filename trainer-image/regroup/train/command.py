"""The command line of the loop. Imports packages that may be missing only where it can report that in a sentence."""

import argparse
import sys
from collections.abc import Callable, Sequence

_PACKAGES = {
    "yaml": "pyyaml",
    "sklearn": "scikit-learn",
    "pydantic": "pydantic",
    "torch": "torch",
    "numpy": "numpy",
    "tensorboard": "tensorboard",
}
"""Packages that a training image may lack, by the names under which they are imported."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `python -m regroup.train`, which `regroup train` has as well."""
    parser.add_argument("config", metavar="CONFIG", help="a YAML file: docs/how-to/train.md has every field")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="changes",
        metavar="FIELD=VALUE",
        help="change a field of the configuration, such as steps=100 or optimizer.learning_rate=3e-4; may be repeated",
    )
    parser.add_argument(
        "--print", action="store_true", dest="prints", help="print the whole configuration with its defaults, and exit"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m regroup.train", description="Train what a configuration says.")
    add_arguments(parser)
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Train and return the exit code: 0, or 2 for a mistake in the configuration or its data."""
    return saying(lambda: _run(args))


def saying(act: Callable[[], None]) -> int:
    """Call `act` and return 0. If the user can correct the error, print a line for each mistake to stderr and return 2."""
    try:
        act()
    except ModuleNotFoundError as error:
        if error.name not in _PACKAGES:
            raise
        package = _PACKAGES[error.name]
        print(
            f"regroup: regroup.train needs the package {package}, which is not installed. Install it.", file=sys.stderr
        )
        return 2
    except ValueError as error:  # ConfigError and DataError are for the user, any other is a fault of the library
        from .config import ConfigError

        known: tuple[type[ValueError], ...] = (ConfigError,)
        if "torch" in sys.modules:
            from regroup.data import DataError

            known = (ConfigError, DataError)
        if not isinstance(error, known):
            raise
        for line in str(error).splitlines():
            print(f"regroup: {line}", file=sys.stderr)
        return 2
    return 0


def _run(args: argparse.Namespace) -> None:
    from .config import as_yaml, load

    config = load(args.config, args.changes)
    if args.prints:
        print(as_yaml(config), end="")
        return
    from regroup import torch_versions
    from regroup.errors import UsageError

    from .config import ConfigError

    try:
        torch_versions.require()
    except UsageError as error:
        raise ConfigError(str(error)) from None
    from .loop import train

    train(config)
