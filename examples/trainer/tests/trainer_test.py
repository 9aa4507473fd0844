#!/usr/bin/env python3
"""Runs the trainer as a person does, on small models with random weights."""

import argparse
import fcntl
import json
import math
import pathlib
import resource
import signal
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

import gguf_reader

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "common" / "tests"))
import tiny_models

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--trainer", required=True)
parser.add_argument("--models", required=True, type=pathlib.Path)
parser.add_argument("--engine", default="", help="an engine that reads what was trained")
arguments = parser.parse_args()

TEXT = "The quick brown fox jumps over the lazy dog, again and again; 12 times, then 345 more! "
INTERRUPTED = 130
PLOT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "plot_loss.py"


class TrainerTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.text = self.folder / "text.txt"
        self.text.write_text(TEXT)
        self.lines = self.folder / "lines.jsonl"
        rows = [{"prompt": f"again {i}", "completion": f" over the {i * i}"} for i in range(20)]
        self.lines.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def command(self, *flags, model="plain_f32", data=None):
        path = arguments.models / f"{model}.gguf"
        return [arguments.trainer, "--model", path, "--data", data or self.lines, "--json", *flags]

    def run_trainer(self, *flags, status=0, **options):
        limit = options.pop("limit", None)

        def limit_files():
            # Python ignores SIGXFSZ, and so does the trainer then: a write past the limit fails.
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        done = subprocess.run(
            self.command(*flags, **options),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            preexec_fn=limit_files if limit else None,
            restore_signals=limit is None,
        )
        self.assertEqual(done.returncode, status, done.stderr)
        reports = [json.loads(line) for line in done.stdout.splitlines()]
        for memory in (report["memory"] for report in reports):
            # What lies between tensors, and what putting a LoRA together takes, is not estimated.
            self.assertLessEqual(abs(memory["real"] - memory["estimated"]), 0.02 * memory["real"])
        return reports, done.stderr

    def run_engine(self, model, *flags):
        command = [arguments.engine, "--model", model, "--weights", "f32", "--json", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return json.loads(done.stdout)

    def interrupt(self, after, *flags):
        """Starts a run and interrupts it when it has reported so many steps."""
        with tempfile.TemporaryFile("w+") as errors:
            pipes = {"stdout": subprocess.PIPE, "stderr": errors}
            run = subprocess.Popen(self.command(*flags), text=True, **pipes)
            # A pipe that holds few lines: the run waits for them to be read, and cannot be over early.
            fcntl.fcntl(run.stdout, getattr(fcntl, "F_SETPIPE_SZ", 1031), 4096)
            reports = [json.loads(run.stdout.readline()) for _ in range(after)]
            run.send_signal(signal.SIGINT)
            # Not communicate(), which does not see the lines that readline() has read ahead.
            with run.stdout:
                reports += [json.loads(line) for line in run.stdout]
            status = run.wait(timeout=120)
            errors.seek(0)
            said = errors.read()
        self.assertEqual(status, INTERRUPTED, said)
        self.assertIn("interrupted after step", said)
        return reports

    def test_learns_a_text(self):
        flags = ["--steps", "20", "--learning-rate", "3e-3", "--output-type", "f32"]
        output = self.folder / "out.gguf"
        reports, _ = self.run_trainer(*flags, "--output", output, data=self.text)
        self.assertEqual([report["step"] for report in reports], list(range(1, 21)))
        self.assertLess(reports[-1]["loss"], 0.5 * reports[0]["loss"])
        self.assertGreater(reports[0]["memory"]["real"], 0)
        if arguments.engine:
            # What the trainer calls the loss is what the engine calls the mean NLL, but for the
            # token that ends the text.
            before = self.run_engine(arguments.models / "plain_f32.gguf", "--perplexity", self.text)
            after = self.run_engine(output, "--perplexity", self.text)
            self.assertAlmostEqual(before["mean_nll"], reports[0]["loss"], delta=0.05)
            self.assertLess(after["mean_nll"], reports[-1]["loss"])

    def test_keeps_what_it_was_not_asked_to_change(self):
        output = self.folder / "out.gguf"
        for kind, number in {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8}.items():
            flags = ["--steps", "1", "--output", output, "--output-type", kind]
            self.run_trainer(*flags, model="llama3_f16")
            before = gguf_reader.Gguf(arguments.models / "llama3_f16.gguf")
            after = gguf_reader.Gguf(output)
            file_type = after.metadata.pop("general.file_type")
            self.assertEqual(file_type, {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7}[kind])
            self.assertEqual(after.metadata, before.metadata)
            self.assertEqual(list(after.tensors), list(before.tensors))
            for name, (shape, tensor_type, _) in after.tensors.items():
                self.assertEqual(shape, before.tensors[name][0])
                self.assertEqual(tensor_type, number if len(shape) > 1 else 0)
            self.assertEqual(after.floats("rope_freqs.weight"), before.floats("rope_freqs.weight"))
            if arguments.engine:
                self.run_engine(output, "--prompt", "a", "--tokens", "4", "--temperature", "0")

    def test_lora(self):
        output, adapter = self.folder / "out.gguf", self.folder / "lora.gguf"
        flags = ["--lora", "4", "--lora-alpha", "6", "--lora-targets", "q,v,down", "--epochs", "10"]
        flags += ["--learning-rate", "2e-2", "--batch-tokens", "64", "--accumulate", "2"]
        flags += ["--output", output, "--output-type", "f32", "--output-lora", adapter]
        reports, _ = self.run_trainer(*flags)
        mean = [sum(r["loss"] for r in part) / len(part) for part in (reports[:3], reports[-3:])]
        self.assertLess(mean[1], 0.9 * mean[0])

        base = gguf_reader.Gguf(arguments.models / "plain_f32.gguf")
        merged, lora = gguf_reader.Gguf(output), gguf_reader.Gguf(adapter)
        expected = {
            "general.architecture": "llama",
            "general.type": "adapter",
            "general.name": "plain_f32 LoRA",
            "general.file_type": 0,
            "adapter.type": "lora",
            "adapter.lora.alpha": 6.0,
        }
        self.assertEqual(lora.metadata, expected)
        self.assertEqual(len(lora.tensors), 2 * 2 * 3)
        for name, (shape, _, _) in base.tensors.items():
            if name + ".lora_a" not in lora.tensors:
                self.assertEqual(merged.floats(name), base.floats(name))
                continue
            rank, columns = lora.tensors[name + ".lora_a"][0]
            rows, _ = lora.tensors[name + ".lora_b"][0]
            self.assertEqual((rows, columns, rank), (*shape, 4))
            a, b = lora.floats(name + ".lora_a"), lora.floats(name + ".lora_b")
            self.assertGreater(max(map(abs, b)), 0)
            before, after = base.floats(name), merged.floats(name)
            for i in range(0, rows, 7):
                for j in range(0, columns, 5):
                    product = sum(b[i * rank + k] * a[k * columns + j] for k in range(rank))
                    at = i * columns + j
                    self.assertAlmostEqual(after[at], before[at] + 1.5 * product, places=5)

    def check_resume(self, *flags):
        flags = [*flags, "--epochs", "40", "--batch-tokens", "64", "--accumulate", "2"]
        flags += ["--warmup", "5", "--learning-rate", "1e-3", "--output-type", "f32", "--seed", "3"]
        whole, parts = self.folder / "whole.gguf", self.folder / "parts.gguf"
        expected, _ = self.run_trainer(*flags, "--output", whole)
        flags += ["--checkpoint-dir", self.folder / "checkpoints", "--output", parts]
        first = self.interrupt(2, *flags)
        self.assertFalse(parts.exists())
        self.assertLess(len(first), len(expected))
        rest, _ = self.run_trainer(*flags, "--resume", "--checkpoint", "full")
        numbers = ["step", "loss", "learning_rate", "gradient_norm", "tokens"]
        self.assertEqual(
            [[report[key] for key in numbers] for report in first + rest],
            [[report[key] for key in numbers] for report in expected],
        )
        self.assertEqual(parts.read_bytes(), whole.read_bytes())

    def test_learns_from_ternary_layers_as_from_their_floats(self):
        found = []
        for path in tiny_models.write_ternary(self.folder):
            output = self.folder / f"trained_{path.name}"
            flags = ["--steps", "2", "--lora", "2", "--lora-targets", "q", "--output", output]
            reports, _ = self.run_trainer(*flags, model=path.with_suffix(""))
            # What was learned and what was not: layers are decoded from the file.
            model = gguf_reader.Gguf(output)
            learned = {name: model.floats(name) for name in model.tensors}
            found.append(([report["loss"] for report in reports], learned))
        codes, floats = found
        self.assertEqual(codes, floats)

    def test_resumes_with_the_same_bits(self):
        self.check_resume()

    def test_resumes_a_lora_with_the_same_bits(self):
        self.check_resume("--lora", "4")

    def test_resumes_in_half_precision_with_the_same_bits(self):
        self.check_resume("--dtype", "f16")

    def test_resumes_on_two_ranks_with_the_same_bits(self):
        self.check_resume("--data-parallel", "2")

    def test_resumes_with_gradients_in_bf16_with_the_same_bits(self):
        self.check_resume("--dtype", "bf16", "--gradients", "bf16", "--data-parallel", "2")

    def test_resumes_with_a_shared_optimizer_with_the_same_bits(self):
        self.check_resume("--data-parallel", "2", "--shard-optimizer")

    def test_resumes_with_a_shared_optimizer_in_half_precision_with_the_same_bits(self):
        self.check_resume("--data-parallel", "2", "--shard-optimizer", "--dtype", "f16")

    def test_resumes_with_two_parts_of_the_text_with_the_same_bits(self):
        self.check_resume("--context-parallel", "2")

    def test_resumes_in_two_stages_with_the_same_bits(self):
        self.check_resume("--pipeline-parallel", "2")

    def test_resumes_a_lora_in_two_stages_with_the_same_bits(self):
        self.check_resume("--lora", "4", "--pipeline-parallel", "2")

    def check_ranks(self, way, *flags):
        flags = [*flags, "--steps", "12", "--batch-tokens", "64", "--accumulate", "4"]
        flags += ["--output-type", "f32"]
        of_ranks = {}
        for size in ("1", "2", "4"):
            output = self.folder / f"{size}.gguf"
            reports, _ = self.run_trainer(*flags, way, size, "--output", output)
            of_ranks[size] = reports, gguf_reader.Gguf(output)
        alone, model = of_ranks["1"]
        self.assertLess(alone[-1]["loss"], 0.9 * alone[0]["loss"])
        for reports, other in of_ranks.values():
            for report, expected in zip(reports, alone, strict=True):
                self.assertEqual(report["tokens"], expected["tokens"])
                for key in ("loss", "gradient_norm"):
                    self.assertAlmostEqual(report[key] / expected[key], 1, delta=1e-4)
            for name in model.tensors:
                pairs = zip(other.floats(name), model.floats(name), strict=True)
                self.assertLess(max(abs(a - b) for a, b in pairs), 1e-3)

    def test_ranks_learn_what_one_does(self):
        self.check_ranks("--data-parallel", "--learning-rate", "1e-3")

    def test_ranks_that_share_the_optimizer_learn_what_one_does(self):
        self.check_ranks("--data-parallel", "--shard-optimizer", "--learning-rate", "1e-3", "--weight-decay", "0.1")

    def test_ranks_that_share_the_optimizer_have_the_losses_of_those_that_do_not(self):
        # In the dtype of the optimizer's remainders and masters, with biases, and with gradients in bf16.
        for model, dtype, *more in (
            ("biases_q4_1", "f32"), ("plain_f32", "f16"), ("mqa_bf16", "bf16"), ("plain_f32", "bf16", "--gradients", "bf16"),
        ):
            flags = ["--dtype", dtype, "--steps", "8", "--batch-tokens", "64", "--learning-rate", "3e-4", "--weight-decay", "0.1"]
            flags += ["--data-parallel", "2", "--output", self.folder / "out.gguf", *more]
            each, shared = (self.run_trainer(*flags, *way, model=model)[0] for way in ([], ["--shard-optimizer"]))
            for report, expected in zip(shared, each, strict=True):
                self.assertEqual(report["skipped"], expected["skipped"])
                for key in ("loss", "gradient_norm"):
                    self.assertAlmostEqual(report[key] / expected[key], 1, delta=1e-4 if dtype == "f32" else 1e-2)

    def test_ranks_that_share_the_optimizer_have_a_part_of_its_state(self):
        flags = ["--steps", "2", "--batch-tokens", "8", "--data-parallel", "2", "--output", self.folder / "out.gguf"]
        model = self.layers(tied=True)
        each, shared = (self.run_trainer(*flags, *way, model=model)[0][0]["memory"] for way in ([], ["--shard-optimizer"]))
        shapes = {name: shape for name, (shape, _, _) in gguf_reader.Gguf(model.with_suffix(".gguf")).tensors.items()}
        # Half of two moments of f32.
        state = 4 * sum(math.prod(shape) for shape in shapes.values())
        for kind in ("real", "estimated"):
            self.assertAlmostEqual((each[kind] - shared[kind]) / state, 1, delta=0.1)

    def test_ranks_learn_a_lora_as_one_does(self):
        self.check_ranks("--data-parallel", "--lora", "4", "--learning-rate", "5e-3")

    def test_ranks_with_gradients_in_bf16_learn_what_one_does(self):
        # One rank adds up as many batches in f32, or has the same one in bf16.
        narrow = ["--gradients", "bf16"]
        ways = {
            "2": ([], [*narrow, "--data-parallel", "2"]),
            "4": ([], [*narrow, "--data-parallel", "4"]),
            "1": (narrow, [*narrow, "--context-parallel", "2"]),
        }
        for model in ("plain_f32", "biases_q4_1"):
            for batches, (one, several) in ways.items():
                flags = ["--dtype", "bf16", "--steps", "12", "--batch-tokens", "64", "--learning-rate", "3e-4"]
                flags += ["--accumulate", batches, "--output", self.folder / "out.gguf"]
                alone, of_ranks = (self.run_trainer(*flags, *more, model=model)[0] for more in (one, several))
                self.assertLess(alone[-1]["loss"], 0.9 * alone[0]["loss"])
                for report, expected in zip(of_ranks, alone, strict=True):
                    self.assertEqual(report["tokens"], expected["tokens"])
                    for key in ("loss", "gradient_norm"):
                        self.assertAlmostEqual(report[key] / expected[key], 1, delta=1e-2)

    def test_gradients_in_bf16_take_half_of_the_memory_but_for_the_table(self):
        real = []
        # Layers are most of this model.
        model = self.layers(tied=True)
        flags = ["--dtype", "bf16", "--steps", "2", "--batch-tokens", "8", "--output", self.folder / "out.gguf"]
        for kind in ("f32", "bf16"):
            reports, _ = self.run_trainer(*flags, "--gradients", kind, model=model)
            real.append(reports[0]["memory"]["real"])
        shapes = {name: shape for name, (shape, _, _) in gguf_reader.Gguf(model.with_suffix(".gguf")).tensors.items()}
        elements = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("blk."))
        # Of workspaces a product that adds to nothing may need more or less.
        self.assertAlmostEqual((real[0] - real[1]) / (2 * elements), 1, delta=0.05)

    def test_ranks_with_parts_of_the_text_learn_what_one_does(self):
        self.check_ranks("--context-parallel", "--learning-rate", "1e-3")

    def test_ranks_with_parts_of_the_text_learn_a_lora_as_one_does(self):
        self.check_ranks("--context-parallel", "--lora", "4", "--learning-rate", "5e-3")

    def test_ranks_with_parts_of_the_text_have_the_same_bits_where_they_compute_again(self):
        found = []
        for policy in ("none", "full"):
            output = self.folder / f"{policy}.gguf"
            flags = ["--steps", "4", "--batch-tokens", "64", "--context-parallel", "2", "--learning-rate", "1e-3"]
            flags += ["--checkpoint", policy, "--output", output, "--output-type", "f32"]
            reports, _ = self.run_trainer(*flags, model="biases_q4_1")
            found.append(([report["loss"] for report in reports], output.read_bytes(), reports[0]["memory"]["real"]))
        kept, computed = found
        self.assertEqual(computed[:2], kept[:2])
        self.assertLess(computed[2], kept[2])

    def layers(self, tied):
        """A model that more than two ranks can divide by its layers."""
        path = self.folder / "layers.gguf"
        tiny_models.make(path, seed=41, add_tokenizer=tiny_models.bpe, kind=tiny_models.F32, tied=tied, layers=5)
        return path.with_suffix("")

    def in_stages(self, size, model, *flags):
        output = self.folder / f"{size}.gguf"
        flags = [*flags, "--steps", "12", "--batch-tokens", "64", "--accumulate", "4", "--output-type", "f32"]
        reports, _ = self.run_trainer(*flags, "--pipeline-parallel", size, "--output", output, model=model)
        return reports, output

    def check_stages(self, model, *flags):
        alone, output = self.in_stages("1", model, *flags)
        expected = gguf_reader.Gguf(output)
        self.assertLess(alone[-1]["loss"], 0.9 * alone[0]["loss"])
        for size in ("2", "3", "5"):
            reports, output = self.in_stages(size, model, *flags)
            for report, of_one in zip(reports, alone, strict=True):
                self.assertEqual(report["tokens"], of_one["tokens"])
                for key in ("loss", "gradient_norm"):
                    self.assertAlmostEqual(report[key] / of_one[key], 1, delta=1e-4)
            self.assertLess(reports[0]["memory"]["real"], 0.75 * alone[0]["memory"]["real"])
            found = gguf_reader.Gguf(output)
            self.assertEqual(list(found.tensors), list(expected.tensors))
            for name in expected.tensors:
                pairs = zip(found.floats(name), expected.floats(name), strict=True)
                self.assertLess(max(abs(a - b) for a, b in pairs), 1e-3)

    def test_stages_learn_what_one_rank_does(self):
        self.check_stages(self.layers(tied=True), "--learning-rate", "1e-3")

    def test_stages_learn_a_lora_as_one_rank_does(self):
        adapter = self.folder / "lora.gguf"
        flags = ["--lora", "4", "--learning-rate", "5e-3", "--output-lora", adapter]
        self.check_stages(self.layers(tied=True), *flags)
        self.assertEqual(len(gguf_reader.Gguf(adapter).tensors), 2 * 7 * 5)

    def test_stages_leave_out_the_same_steps(self):
        # Of a single token the scaled gradients are too great for f16 at first.
        few = self.folder / "few.jsonl"
        few.write_text("".join(json.dumps({"prompt": f"a{i}", "completion": ""}) + "\n" for i in range(20)))
        flags = ["--dtype", "f16", "--learning-rate", "1e-3", "--steps", "6", "--batch-tokens", "8"]
        flags += ["--accumulate", "1", "--output", self.folder / "out.gguf"]
        model = self.layers(tied=False)
        found = []
        for size in ("1", "2", "3"):
            reports, _ = self.run_trainer(*flags, "--pipeline-parallel", size, model=model, data=few)
            found.append([(report["skipped"], report["loss_scale"]) for report in reports])
        self.assertIn(True, [skipped for skipped, _ in found[0]])
        self.assertEqual(found[1:], found[:1] * 2)

    def test_stages_have_the_same_bits_where_nothing_is_summed_over_ranks(self):
        model = self.layers(tied=False)
        flags = ["--clip", "0", "--learning-rate", "1e-3"]
        alone, output = self.in_stages("1", model, *flags)
        expected = output.read_bytes()
        for size in ("2", "3", "5"):
            reports, output = self.in_stages(size, model, *flags)
            self.assertEqual([r["loss"] for r in reports], [r["loss"] for r in alone])
            self.assertEqual(output.read_bytes(), expected)

    def test_stages_stop_together(self):
        output = self.folder / "out.gguf"
        flags = ["--steps", "9", "--batch-tokens", "64", "--learning-rate", "1e30", "--output", output]
        _, errors = self.run_trainer(*flags, "--pipeline-parallel", "2", status=1)
        self.assertIn("is not finite", errors)
        _, errors = self.run_trainer("--output", output, "--pipeline-parallel", "3", status=1)
        self.assertIn("2 layers, too few for 3 ranks", errors)
        flags = ["--steps", "4", "--output", output, "--checkpoint-dir", self.folder / "checkpoints"]
        _, errors = self.run_trainer(*flags, "--pipeline-parallel", "2", status=1, limit=1 << 16)
        self.assertIn("trainer.checkpoint: cannot write: File too large", errors)
        self.assertFalse(output.exists())

    def test_ranks_stop_together(self):
        output = self.folder / "out.gguf"
        flags = ["--steps", "9", "--batch-tokens", "64", "--learning-rate", "1e30", "--output", output]
        _, errors = self.run_trainer(*flags, "--data-parallel", "2", status=1)
        self.assertIn("is not finite", errors)
        _, errors = self.run_trainer(
            "--output", output, "--data-parallel", "2", model="nothing", status=1
        )
        self.assertIn("nothing.gguf: cannot open", errors)
        flags = ["--output", output, "--accumulate", "3", "--data-parallel", "2"]
        _, errors = self.run_trainer(*flags, status=2)
        self.assertIn("--accumulate is 3, which the ranks of --data-parallel 2", errors)

    def test_writes_a_log(self):
        log = self.folder / "log.jsonl"
        output = self.folder / "out.gguf"
        reports, _ = self.run_trainer("--steps", "3", "--output", output, "--log", log)
        self.assertEqual([json.loads(line) for line in log.read_text().splitlines()], reports)
        curve = self.folder / "loss.svg"
        subprocess.run([sys.executable, PLOT, log, curve], timeout=60, check=True)
        circles = xml.etree.ElementTree.parse(curve).findall("{http://www.w3.org/2000/svg}circle")
        self.assertEqual(len(circles), len(reports))

    def test_says_what_is_wrong_with_files(self):
        output = self.folder / "out.gguf"
        bad = self.folder / "bad.jsonl"
        bad.write_text('{"text": "a"}\n{"text": }\n')
        _, errors = self.run_trainer("--output", output, data=bad, status=1)
        self.assertIn("bad.jsonl:2: a value is missing, at character 10", errors)
        _, errors = self.run_trainer("--output", output, model="nothing", status=1)
        self.assertIn("nothing.gguf: cannot open: No such file", errors)
        _, errors = self.run_trainer("--output", self.folder / "no" / "out.gguf", status=1)
        self.assertIn("cannot create: No such file", errors)
        self.assertFalse(output.exists())
        _, errors = self.run_trainer("--output", output, "--steps", "none", status=2)
        self.assertIn("--steps takes an integer", errors)

    def test_stops_where_the_loss_is_not_finite(self):
        checkpoints, output = self.folder / "checkpoints", self.folder / "out.gguf"
        flags = ["--steps", "9", "--batch-tokens", "64", "--learning-rate", "1e30"]
        flags += ["--schedule", "constant", "--checkpoint-dir", checkpoints, "--save-every", "1"]
        flags += ["--output", output]
        reports, errors = self.run_trainer(*flags, status=1)
        self.assertIn(f"of step {len(reports)} is not finite", errors)
        self.assertIn(f"the checkpoint of step {len(reports) - 1} is as it was", errors)
        self.assertEqual([path.name for path in checkpoints.iterdir()], ["trainer.checkpoint"])
        self.assertFalse(output.exists())

    def test_keeps_the_checkpoint_where_the_disk_is_full(self):
        checkpoints, output = self.folder / "checkpoints", self.folder / "out.gguf"
        flags = ["--epochs", "200", "--batch-tokens", "64", "--output", output]
        flags += ["--checkpoint-dir", checkpoints]
        self.interrupt(1, *flags)
        checkpoint = checkpoints / "trainer.checkpoint"
        before = checkpoint.read_bytes()
        flags += ["--resume", "--save-every", "1"]
        _, errors = self.run_trainer(*flags, status=1, limit=1 << 16)
        self.assertIn("trainer.checkpoint: cannot write: File too large", errors)
        self.assertEqual(checkpoint.read_bytes(), before)
        self.assertEqual([path.name for path in checkpoints.iterdir()], ["trainer.checkpoint"])

    def test_refuses_checkpoints_that_do_not_fit(self):
        checkpoints = self.folder / "checkpoints"
        flags = ["--steps", "2", "--checkpoint-dir", checkpoints]
        _, errors = self.run_trainer(*flags, "--resume", status=1)
        self.assertIn("trainer.checkpoint: cannot open", errors)
        self.run_trainer(*flags)
        for other in (["--batch-tokens", "64"], ["--lora", "2"], ["--learning-rate", "0.5"]):
            _, errors = self.run_trainer(*flags, *other, "--resume", status=1)
            self.assertIn(f"the checkpoint was made with '{other[0]} ", errors)
        in_bf16 = ["--steps", "2", "--dtype", "bf16", "--checkpoint-dir", self.folder / "bf16"]
        self.run_trainer(*in_bf16)
        _, errors = self.run_trainer(*in_bf16, "--gradients", "bf16", "--resume", status=1)
        self.assertIn("the checkpoint was made with '--gradients ", errors)
        _, errors = self.run_trainer(*flags, "--resume", data=self.text, status=1)
        self.assertIn("the checkpoint was made with '--data ", errors)

        checkpoint = checkpoints / "trainer.checkpoint"
        whole = checkpoint.read_bytes()
        for damaged in (whole[:-9], whole[:-1], whole[: len(whole) // 2], whole + b"x"):
            checkpoint.write_bytes(damaged)
            _, errors = self.run_trainer(*flags, "--resume", status=1)
            self.assertIn("the checkpoint is damaged", errors)
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 16
        checkpoint.write_bytes(flipped)
        _, errors = self.run_trainer(*flags, "--resume", status=1)
        self.assertIn("its checksum is another", errors)
        checkpoint.write_bytes(b"something else")
        _, errors = self.run_trainer(*flags, "--resume", status=1)
        self.assertIn("not a checkpoint", errors)


if __name__ == "__main__":
    unittest.main(argv=["trainer_test.py"])
