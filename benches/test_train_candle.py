"""The table of training steps beside candle's has a row for each case, with both and their ratio."""

import copy
import unittest

import regression
import train_candle

STEP = {
    "tokens": 1024,
    "seconds": {"unsloth": 4.0, "candle": 10.0},
    "peak_bytes": {"unsloth": 2 << 30, "candle": 7 << 30},
    "losses": {"unsloth": [10.0, 9.0], "candle": [10.0, 9.0009]},
}
RESULT = {
    "date": "2026-01-01",
    "cpu": "CPU",
    "threads": 2,
    "candle": "0.11.1",
    "dtype": "f32",
    "layers": 30,
    "rounds": 7,
    "steps": {"2x512": STEP},
}


class TrainCandle(unittest.TestCase):
    def test_rows(self):
        lines = train_candle.section(RESULT).splitlines()
        self.assertIn("at most 1.0e-04 of themselves apart", lines[1])
        self.assertEqual(
            lines[-1], "| 2x512 | 4.00 s | 256 | 2.0 | 10.00 s | 102 | 7.0 | 2.50× |"
        )
        self.assertTrue(all(line.count("|") == 9 for line in lines[3:]))

    def test_a_slower_step_is_lost(self):
        slower = copy.deepcopy(RESULT)
        slower["steps"]["2x512"]["seconds"]["unsloth"] = 5.0
        kind, cells = regression.cells_of(RESULT)
        _, after = regression.cells_of(slower)
        self.assertEqual(kind, "train_candle")
        self.assertAlmostEqual(cells["2x512"].slower(after["2x512"]), 0.25)
        self.assertEqual(cells["2x512"].beside, {"candle": 10.0})


if __name__ == "__main__":
    unittest.main()
