"""`python -m benchmarks [NAME]`: run one benchmark, or all of them for which there is what they need."""

import importlib
import sys
from pathlib import Path

names = sorted(p.stem for p in Path(__file__).parent.glob("[!_]*.py") if not p.stem.endswith("support"))
chosen = sys.argv[1:] or names
for name in chosen:
    if name not in names:
        sys.exit(f"error: no benchmark {name!r}\nhint: there are: {', '.join(names)}")
    try:
        importlib.import_module(f"benchmarks.{name}").main()
    except SystemExit as lack:
        if sys.argv[1:]:
            raise
        print(lack.code, file=sys.stderr)
