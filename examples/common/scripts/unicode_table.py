#!/usr/bin/env python3
"""Writes src/unicode_table.inc: the code points that are letters, numbers and white space.

    pip install unicodedata2==18.0.0      # else the (older) Unicode of the Python that runs this
    python scripts/unicode_table.py
"""

import pathlib
import sys

try:
    import unicodedata2 as unicodedata
except ImportError:
    import unicodedata

OUTPUT = pathlib.Path(__file__).resolve().parent.parent / "src" / "unicode_table.inc"
# White_Space of PropList.txt: the separators (general categories Z*) and these controls.
WHITE_SPACE_CONTROLS = {0x09, 0x0A, 0x0B, 0x0C, 0x0D, 0x85}


def classify(code_point):
    category = unicodedata.category(chr(code_point))
    if category[0] == "L":
        return "kLetter"
    if category[0] == "N":
        return "kNumber"
    if category[0] == "Z" or code_point in WHITE_SPACE_CONTROLS:
        return "kSpace"
    return None


def ranges():
    start, current = 0, None
    for code_point in range(sys.maxunicode + 2):
        found = classify(code_point) if code_point <= sys.maxunicode else None
        if found != current:
            if current is not None:
                yield start, code_point - 1, current
            start, current = code_point, found


def main():
    entries = [f"{{0x{first:X}, 0x{last:X}, {kind}}}" for first, last, kind in ranges()]
    lines, line = [], ""
    for entry in entries:
        if len(line) + len(entry) + 2 > 100:
            lines.append(line)
            line = ""
        line += (" " if line else "") + entry + ","
    lines.append(line)
    OUTPUT.write_text(
        f"// Unicode {unicodedata.unidata_version}; written by scripts/unicode_table.py.\n"
        + "\n".join(lines)
        + "\n"
    )
    print(f"{OUTPUT}: {len(entries)} ranges of Unicode {unicodedata.unidata_version}")


if __name__ == "__main__":
    main()
