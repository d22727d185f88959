"""Compiles a saved bank ahead for an NPU platform: python -m experiments.npu_bank BANK PLATFORM

Needs the compiler (make npu-compile), and no NPU. Writes BANK-npuPLATFORM beside the bank, which on a machine with that NPU is
read by GraphBank.load(BANK, device="NPU").compile(ahead=BANK-npuPLATFORM), and refused elsewhere.
"""

import argparse
import sys
from pathlib import Path

from experiments.progress import bar, say
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank
from shadowattn.graphs.npu.compiler import PLATFORMS, NpuCompiler


def main() -> None:
    """The command line: prints the folder that it wrote."""
    parser = argparse.ArgumentParser(prog="python -m experiments.npu_bank", description=__doc__.splitlines()[0])
    parser.add_argument("bank", type=Path, help="folder of a saved bank, such as results/artifacts/bank-HASH")
    parser.add_argument("platform", choices=PLATFORMS, help=", ".join(f"{name}: {what}" for name, what in PLATFORMS.items()))
    options = parser.parse_args()
    bank = options.bank.resolve()  # of "." too
    folder = bank.with_name(f"{bank.name}-npu{options.platform}")
    try:
        with NpuCompiler() as compiler:
            graphs = GraphBank.load(bank)
            graphs.compile_ahead(options.platform, folder, compiler, progress=lambda names: bar(names, "compile"))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; nothing is written", file=sys.stderr)
        sys.exit(130)
    size = sum(path.stat().st_size for path in folder.glob("*.blob"))
    say(f"{len(graphs)} graphs for NPU {options.platform}, {size / 1e6:.2f} MB; compiled, not run")
    print(folder)


if __name__ == "__main__":
    main()
