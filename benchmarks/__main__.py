"""`python -m benchmarks [NAME]`: run one benchmark or all of them."""

import importlib
import sys
from pathlib import Path

names = sorted(p.stem for p in Path(__file__).parent.glob("[!_]*.py") if p.stem != "support")
chosen = sys.argv[1:] or names
for name in chosen:
    if name not in names:
        sys.exit(f"error: no benchmark {name!r}\nhint: there are: {', '.join(names)}")
    importlib.import_module(f"benchmarks.{name}").main()
