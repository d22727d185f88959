"""Makes `lm_eval --model shadowattn` work in an environment: `python -m shadowattn.evaluation.harness_command add`.

lm-evaluation-harness finds models in a table of its own and reads no entry points, so that a package has to speak before the
command does. Python offers the `.pth` files of site-packages for that: `add` writes one whose single line acts where the command
is `lm_eval`, and `remove` deletes it.
"""

import argparse
import sys
import sysconfig
from pathlib import Path

from shadowattn.errors import InputError

FILE = "shadowattn_lm_eval.pth"
# Python runs this line at its start, `lm_eval` being the script or `python -m lm_eval`. Without the package it does nothing.
LINE = (
    "import os, sys; from importlib.util import find_spec; "
    "{os.path.basename(part).split('.')[0] for part in sys.orig_argv[:3]} & {'lm_eval', 'lm-eval'} and find_spec('shadowattn') "
    "and __import__('shadowattn.evaluation.harness_command', fromlist=['announce']).announce()\n"
)


def announce() -> None:
    """Tells the harness where the model's class is, which is imported when it is asked for."""
    from lm_eval.api.registry import model_registry

    model_registry.register("shadowattn", target="shadowattn.evaluation.harness:ShadowAttnLM")


def add(folder: Path) -> Path:
    """Writes the file into `folder`, a site-packages folder, and returns its path.

    Raises `InputError` where the folder cannot be written.
    """
    path = folder / FILE
    try:
        path.write_text(LINE)
    except OSError as error:
        raise InputError(
            f"{path}: expected a folder that can be written, got {error.strerror}; use a virtual environment"
        ) from None
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["add", "remove"], help=f"write or delete {FILE} in this environment's site-packages")
    folder = Path(sysconfig.get_path("purelib"))
    if parser.parse_args().action == "remove":
        (folder / FILE).unlink(missing_ok=True)
        print(f"removed {folder / FILE}")
        return 0
    try:
        path = add(folder)
    except InputError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"wrote {path}: lm_eval --model shadowattn works in this environment")
    return 0


if __name__ == "__main__":
    sys.exit(main())
