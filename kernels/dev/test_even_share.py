"""Blocks of decoding attention take a little more than their equal share where that cuts fewer sequences."""

import os
import pathlib
import subprocess
import tempfile
import unittest

HEADER = pathlib.Path(__file__).resolve().parent.parent / "cuda" / "attention" / "decode" / "even_share.cuh"
# Share, tiles of a pair of a sequence and a key head, how many more are allowed, and what is expected.
CASES = [
    # Whole pairs, and not so many.
    (63, 16, 1, 64),
    (125, 64, 3, 128),
    (125, 64, 2, 125),
    (5, 5, 0, 5),
    (1, 1, 3, 1),
    # Equal parts of one, and parts that none of as many tiles are.
    (31, 64, 1, 32),
    (32, 1024, 3, 32),
    (31, 1024, 3, 31),
    (32, 65, 3, 32),
    (60, 64, 3, 60),
    (61, 64, 3, 64),
    (2, 3, 9, 3),
]
SOURCE = """
#define __device__
#define __forceinline__ inline
#include "{header}"
#include <cstdio>
int main() {{
  int share, of_pair, more;
  while (std::scanf("%d %d %d", &share, &of_pair, &more) == 3) {{
    std::printf("%d\\n", unsloth::even_share(share, of_pair, more));
  }}
}}
"""


class EvenShareTest(unittest.TestCase):
    def test_shares_cut_no_pairs_where_that_costs_little(self):
        with tempfile.TemporaryDirectory() as folder:
            source, program = (pathlib.Path(folder) / name for name in ("main.cpp", "main"))
            source.write_text(SOURCE.format(header=HEADER))
            subprocess.run([os.environ.get("CXX", "c++"), "-std=c++17", source, "-o", program], check=True)
            given = "\n".join(" ".join(map(str, case[:3])) for case in CASES)
            found = subprocess.run([program], input=given, capture_output=True, text=True, check=True).stdout
        self.assertEqual([int(line) for line in found.split()], [case[3] for case in CASES])


if __name__ == "__main__":
    unittest.main()
