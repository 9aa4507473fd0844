"""The list of kernels has a line for each, aligned, and their occupancy where it is known."""

import unittest

import kernels


class KernelsTest(unittest.TestCase):
    def test_lines(self):
        known = {
            "kernel": "attention_f16_d64",
            "architecture": "90a",
            "registers": 168,
            "static_shared_bytes": 16,
            "occupancy": {"threads": 128, "dynamic_shared_bytes": 1008, "blocks": 3, "percent": 18},
        }
        unknown = dict(known, kernel="cast", architecture="130", occupancy=None)
        heading, first, second = kernels.table([known, unknown])
        self.assertEqual(first.split(), "attention_f16_d64 90a 168 128 1024 3 18 %".split())
        self.assertEqual(second.split(), "cast 130 168 16".split())
        self.assertEqual(len(heading), len(first))
        self.assertEqual(len(list(kernels.table([known, unknown], "cast"))), 2)
        self.assertEqual(len(list(kernels.table([known, unknown], "", "80"))), 1)


if __name__ == "__main__":
    unittest.main()
