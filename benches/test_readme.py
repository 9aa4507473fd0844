"""The README shows the program of examples/c/readme.c as it is, and stays short."""

import pathlib
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent


class Readme(unittest.TestCase):
    def test_the_c_example_is_the_program_that_is_tested(self):
        program = (ROOT / "examples" / "c" / "readme.c").read_text()
        self.assertIn(f"```c\n{program}```\n", (ROOT / "README.md").read_text())

    def test_it_stays_short(self):
        lines = (ROOT / "README.md").read_text().splitlines()
        self.assertLessEqual(len(lines), 250)
        for number, line in enumerate(lines, 1):
            self.assertLessEqual(len(line), 100, f"line {number}")


if __name__ == "__main__":
    unittest.main()
