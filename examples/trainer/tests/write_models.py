#!/usr/bin/env python3
"""Writes the small models of examples/common/tests/tiny_models.py into a folder.

    python3 write_models.py FOLDER
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "common" / "tests"))
import tiny_models

folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name in tiny_models.MODELS:
    tiny_models.write(name, folder)
