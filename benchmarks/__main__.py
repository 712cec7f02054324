"""All of them, one after the other, with the options that they share.

python -m benchmarks [--short] [--model bert-base] [--dtype float32 bfloat16 int8]
"""

import subprocess
import sys

from benchmarks.options import parser

NAMES = ("limit", "engine", "overhead", "serve", "compare")


def main() -> None:
    """Run each as a program of its own."""
    parser(__doc__).parse_args()
    for name in NAMES:
        print(flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
