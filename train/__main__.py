"""`python -m train recipe.yaml [--dotted.key value ...]`, alone or under torchrun."""

import sys
from collections.abc import Sequence

from core.config import help_text
from core.errors import exit_status
from parallel.launch import together
from train.config import Recipe, load_recipe
from train.layout import start_world
from train.run import train

USAGE = """usage: python -m train RECIPE.yaml [--dotted.key value ...]
       torchrun --nproc-per-node 8 -m train RECIPE.yaml [--dotted.key value ...]

Trains a model from a recipe. Any key of the recipe can be replaced on the command line:
  python -m train recipes/demo.yaml --training.optimizer.learning_rate 1e-4
  python -m train recipes/demo.yaml --training.checkpoint.resume_from_checkpoint latest

Keys, types, defaults:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; bad input is printed as `error: ...` to stderr, with exit status 2.

    A run that SIGTERM or SIGINT stopped after a step exits with 143 or 130. Of several processes that torchrun
    started, all end with the first that fails, which alone says why.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or "--help" in args or "-h" in args:
        print(USAGE + help_text(Recipe, color=sys.stdout.isatty()))
        return 0 if args else 2
    return exit_status(lambda: run(args[0], args[1:]))


def run(path: str, overrides: Sequence[str]) -> None:
    """Trains from a recipe file on the processes that were started."""
    with together() as place:
        recipe = load_recipe(path, overrides)
        train(recipe, start_world(recipe, place))


if __name__ == "__main__":
    sys.exit(main())
