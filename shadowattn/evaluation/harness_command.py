"""Makes `lm_eval --model shadowattn` work in an environment: `python -m shadowattn.evaluation.harness_command add`.

lm-evaluation-harness finds models in a table of its own and reads no entry points, so that a package has to speak before the
command does. Python offers the `.pth` files of site-packages for that: `add` writes one whose single line acts where the command
is `lm_eval`, and `remove` deletes it.
"""

import argparse
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from shadowattn.errors import InputError

FILE = "shadowattn_lm_eval.pth"
# Python runs this line at its start. `lm_eval` is a script in a folder of programs, or the word behind `-m`.
LINE = (
    "import os, sys; from importlib.util import find_spec; "
    "any(part == '-m' and word in ('lm_eval', 'lm_eval.__main__') or os.sep in word and os.path.basename(word).split('.')[0] in "
    "('lm_eval', 'lm-eval') for part, word in zip(sys.orig_argv, sys.orig_argv[1:])) and find_spec('shadowattn') "
    "and __import__('shadowattn.evaluation.harness_command', fromlist=['announce']).announce()\n"
)


def announce() -> None:
    """Tells the harness where the model's class is, which is imported when it is asked for."""
    from lm_eval.api.registry import model_registry

    model_registry.register("shadowattn", target="shadowattn.evaluation.harness:ShadowAttnLM")


def add(folder: Path) -> Path:
    """Writes the file into `folder`, a site-packages folder, and returns its path.

    Raises `InputError` where the line would have nothing to announce or nobody to tell, and where the folder cannot be written.
    """
    if find_spec("lm_eval") is None:
        raise InputError('lm_eval: expected the package, found none; install it with: pip install "shadowattn[lm-eval]"')
    found = subprocess.run([sys.executable, "-I", "-c", "import shadowattn"], capture_output=True, cwd=folder.anchor, check=False)
    if found.returncode:
        raise InputError(
            "shadowattn: expected an installed package, got one that Python finds in the present folder alone; install it first"
        )
    return _changed(folder / FILE, lambda path: path.write_text(LINE))


def remove(folder: Path) -> Path | None:
    """Deletes the file and returns its path; None where there was none. Raises `InputError` where it cannot be deleted."""
    return _changed(folder / FILE, Path.unlink) if (folder / FILE).exists() else None


def _changed(path: Path, change: Callable[[Path], object]) -> Path:
    try:
        change(path)
    except OSError as error:
        raise InputError(
            f"{path}: expected a folder that can be written, got {error.strerror}; use a virtual environment"
        ) from None
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["add", "remove"], help=f"write or delete {FILE} in this environment's site-packages")
    action, folder = parser.parse_args().action, Path(sysconfig.get_path("purelib"))
    try:
        if action == "add":
            print(f"wrote {add(folder)}: lm_eval --model shadowattn works in this environment")
        else:
            path = remove(folder)
            print(f"deleted {path}" if path else f"{folder / FILE}: there was none")
    except InputError as error:
        parser.exit(2, f"error: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
