"""Every operation is in each place that tests all of them: covered.py

The driver's stand-in counts what each asks of the driver, the fuzz target calls each, and each has a
test of its own. (allocation/out_of_memory.c looks after itself: it wants every function.)
"""

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
PLACES = [HERE / "driver", HERE.parent / "fuzz" / "fuzz_targets" / "c_abi"]


def text_of(path):
    return "".join(file.read_text() for file in sorted(path.glob("*.rs")) + sorted(path.glob("*.c")))


def main():
    missing = []
    symbols = (HERE / "symbols.txt").read_text().split()
    operations = [name for name in symbols if name.endswith("_forward")]
    for place in PLACES:
        text = text_of(place)
        missing += [
            f"{place.relative_to(HERE.parent)} does not call {name}"
            for name in operations
            if not re.search(rf"\b{name}\b", text)
        ]
    for name in operations:
        own = HERE / (name.removeprefix("unsloth_").removesuffix("_forward") + ".c")
        if not own.exists():
            missing.append(f"there is no c_tests/{own.name}")
    print("\n".join(missing), end="\n" * bool(missing))
    return 1 if missing or not operations else 0


if __name__ == "__main__":
    sys.exit(main())
