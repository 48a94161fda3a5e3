# SPDX-License-Identifier: Apache-2.0
"""Pruning as a user meets it: other ranks, a restart, what a checkpoint holds, what is refused."""
import json
import re
import struct

from run_case import SourceCase, digests, newest_manifest


def tensors_of(path):
    """Of a safetensors file: name to (dtype, shape, bytes)."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + length])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            found[name] = (entry["dtype"], entry["shape"], data[8 + length + start:8 + length + end])
    return found


def shape_of(path):
    """What a layer's file says of the sizes of its state."""
    data = path.read_bytes()
    return json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]["shape"]


def segments(left, rows, columns):
    """Rows in blocks of 128 columns, and columns in blocks of 128 rows, with a weight; `left` has a bit a weight."""
    places = [divmod(place, columns) for place, bit in enumerate(left) if bit]
    return len({(row, column // 128) for row, column in places}) + len({(row // 128, column) for row, column in places})


class Pruning(SourceCase):
    TABLE = "pruning"
    STEPS = 24
    SETTINGS = ("train.steps=24", "checkpoint.every=8", "checkpoint.keep=3", "pruning.enabled=true", "pruning.start=2",
                "pruning.end=17", "pruning.every=5", "pruning.sparse_above=0.7")

    def train(self, run, ranks, *extra, words=()):
        # Units have no format that the sparsity decides, and one event has no steps between.
        idle = ("pruning.sparse_above", "pruning.every") if "pruning.form=units" in extra else ()
        given = [value for value in self.SETTINGS if value.split("=")[0] not in idle]
        return self.succeed(self.command("-n", str(ranks), *words, run=run, extra=(*given, *extra)))

    def test_the_same_numbers_on_any_ranks_and_after_a_restart(self):
        """The restart is at step 16: before the last event, when some matrices are compressed and some are not."""
        _, found = self.assert_same_on_any_ranks(alone=())
        self.assertEqual([step for step in found if "masks" in found[step]], [7, 12, 17])
        self.assertEqual(len({found[step]["masks"] for step in (7, 12, 17)}), 3)
        self.assertAlmostEqual(found[23]["sparsity"], 0.9)
        self.look_into(self.folder / "two" / "checkpoints" / "step-00000024")
        self.assert_generates("two")
        self.succeed(self.export("two"))

    def test_imported_matrices_are_compared_by_their_own_std(self):
        """Measured before the first step, kept in checkpoints; drawn matrices need no measure."""
        self.train("origin", 1)
        origin = self.folder / "origin"
        self.assertNotIn("pruning", newest_manifest(origin)["state"].get("sources", {}))
        for run, ranks in (("imported", 2), ("alone", 1)):
            self.train(run, ranks, f"train.init={origin}")
        imported = self.folder / "imported"
        self.assertEqual(digests(newest_manifest(self.folder / "alone")), digests(newest_manifest(imported)))
        measured = newest_manifest(imported)["state"]["sources"]["pruning"]["initial_std"]
        expected = []
        for path in (origin / "checkpoints" / "step-00000024").glob("*.safetensors"):
            for name, (dtype, shape, data) in tensors_of(path).items():
                if name.startswith("model.layers.") and len(shape) == 2:
                    numbers = struct.unpack(f"<{len(data) // 4}f", data)
                    expected.append((sum(number * number for number in numbers) / len(numbers)) ** 0.5)
        self.assertEqual(len(measured), 3 * 7)
        for found, wanted in zip(sorted(measured), sorted(expected), strict=True):
            self.assertAlmostEqual(found / wanted, 1, places=6)
        self.assert_resumes("imported", "imported-gone-on", 3, f"train.init={origin}")

    def test_killed_around_events(self):
        """A rank is killed at random moments while every second step is an event: one line, what is listed verifies, resume is exact."""
        self.assert_survives_kills("train.steps=120", "pruning.end=100", "pruning.every=2", "checkpoint.every=10", step=100)

    def test_a_measured_break_even_is_a_number_of_the_run(self):
        """Measured once, printed, in the run's config; a resumed run has its bits, though its own config says auto."""
        extra = ("pruning.sparse_above=auto",)
        result = self.train("measured", 2, *extra)
        found = re.search(r"^sparse_above = (.*)$", (self.folder / "measured" / "config.toml").read_text(), re.MULTILINE).group(1)
        self.assertTrue(0.45 <= float(found) <= 1, found)
        self.assertIn(f"pruning.sparse_above = {float(found):g}, measured", result.stdout)
        self.train("given", 2, f"pruning.sparse_above={found}")
        self.assertEqual(digests(newest_manifest(self.folder / "measured")), digests(newest_manifest(self.folder / "given")))

        self.go_back("measured", "gone-on")
        result = self.train("gone-on", 3, *extra, words=("--resume",))
        self.assertNotIn("pruning.sparse_above", result.stdout)
        self.assertEqual(digests(newest_manifest(self.folder / "gone-on")), digests(newest_manifest(self.folder / "given")))

        (self.folder / "gone-on" / "config.toml").unlink()
        result = self.run_command(self.command("-n", "2", "--resume", run="gone-on", extra=(*self.SETTINGS, *extra)))
        self.assert_error(result, 2, "pruning.sparse_above is auto", "config.toml")

    def test_auto_in_bf16_is_a_constant(self):
        result = self.train("bf16", 2, "pruning.sparse_above=auto", "model.precision=bf16")
        self.assertIn("pruning.sparse_above = 0.65, as no layer computes in fp32", result.stdout)
        self.assertIn("sparse_above = 0.65", (self.folder / "bf16" / "config.toml").read_text())

    def look_into(self, checkpoint):
        """Values are whole matrices with zeros where the mask says so; moments hold what is kept."""
        kept = weights = masks = 0
        for path in checkpoint.glob("*.safetensors"):
            tensors = tensors_of(path)
            compressed = []
            for name, (dtype, shape, bits) in tensors.items():
                if not name.startswith("mask."):
                    continue
                masks += 1
                self.assertEqual(dtype, "U8")
                value = name.removeprefix("mask.")
                rows, columns = tensors[value][1]
                numbers = struct.unpack(f"<{rows * columns}f", tensors[value][2])
                left = [bits[i // 8] >> i % 8 & 1 for i in range(rows * columns)]
                self.assertTrue(all(number == 0 for number, one in zip(numbers, left) if not one), name)
                self.assertEqual(tensors["optimizer.exp_avg." + value][1], [sum(left)], name)
                compressed.append((sum(left), segments(left, rows, columns)))
                kept += sum(left)
                weights += rows * columns
            said = [(int(weights_left), int(segments_left)) for weights_left, segments_left in re.findall(r":(\d+)c(\d+)", shape_of(path))]
            self.assertEqual(sorted(said), sorted(compressed), path)
        self.assertEqual(masks, 3 * 7)
        self.assertEqual(kept, round(0.1 * weights))

    UNITS = ("pruning.form=units", "pruning.unit_multiple=1", "pruning.start=8", "pruning.end=8", "pruning.final_sparsity=0.55")

    def removed_units(self, checkpoint):
        """By layer's name, the units that are gone: rows of gate and v, by the masks."""
        gone = {}
        for path in checkpoint.glob("*.safetensors"):
            for name, (dtype, shape, bits) in tensors_of(path).items():
                if name.startswith("mask.") and name.endswith(("gate_proj.weight", "v_proj.weight")):
                    rows, columns = tensors_of(path)[name.removeprefix("mask.")][1]
                    size = 1 if "gate" in name else 8  # of a head
                    gone[name.removeprefix("mask.")] = {
                        unit for unit in range(rows // size) if not bits[unit * size * columns // 8] >> unit * size * columns % 8 & 1}
        return gone

    def largest(self, checkpoint):
        """What the rule says of a checkpoint before the event: plain Python on its tensors."""
        numbers = {}
        for path in checkpoint.glob("*.safetensors"):
            for name, (dtype, shape, data) in tensors_of(path).items():
                if name.startswith("model.layers.") and len(shape) == 2:
                    numbers[name] = (shape, struct.unpack(f"<{len(data) // 4}f", data))
        std = {"o_proj": 0.02 / 6 ** 0.5, "down_proj": 0.02 / 6 ** 0.5}

        def squares(block, matrix, axis, size, unit):
            (rows, columns), values = numbers[f"model.layers.{block}.{matrix}.weight"]
            scale = std.get(matrix.split(".")[1], 0.02) ** 2
            places = ((row, column) for row in range(rows) for column in range(columns) if (row, column)[axis] // size == unit)
            return sum(values[row * columns + column] ** 2 / scale for row, column in places)

        gone = {}
        for first, count, parts in (
                ("mlp.gate_proj", 48, (("mlp.gate_proj", 0, 1), ("mlp.up_proj", 0, 1), ("mlp.down_proj", 1, 1))),
                ("self_attn.v_proj", 2, (("self_attn.q_proj", 0, 16), ("self_attn.k_proj", 0, 8), ("self_attn.v_proj", 0, 8),
                                         ("self_attn.o_proj", 1, 16)))):
            sizes = sorted((sum(squares(block, *part, unit) for part in parts), block, unit) for block in range(3) for unit in range(count))
            best = {block: max((size, unit) for size, of, unit in sizes if of == block)[1] for block in range(3)}
            left = max(round(0.45 * 3 * count), 3)
            removable = [(block, unit) for _, block, unit in sizes if unit != best[block]]
            for block, unit in removable[:3 * count - left]:
                gone.setdefault(f"model.layers.{block}.{first}.weight", set()).add(unit)
        return gone

    def test_units_that_go_are_the_smallest(self):
        """Against plain Python on the checkpoint before; any ranks, a resumed run, text, an export, and what a record says."""
        for run, ranks in (("units", 2), ("units-alone", 1)):
            self.train(run, ranks, *self.UNITS)
        run = self.folder / "units"
        self.assertEqual(digests(newest_manifest(run)), digests(newest_manifest(self.folder / "units-alone")))
        gone = {name: units for name, units in self.removed_units(run / "checkpoints" / "step-00000016").items() if units}
        self.assertEqual(gone, self.largest(run / "checkpoints" / "step-00000008"))
        found = self.figures("units")
        self.assertNotIn("hidden_units", found[7])
        for step in (8, 23):
            self.assertEqual(found[step]["hidden_units"], {"left": 65, "of": 144})
            self.assertEqual(found[step]["head_groups"], {"left": 3, "of": 6})

        self.assert_resumes("units", "units-on", 3, *self.UNITS)
        self.assertEqual(self.figures("units-on")[23], found[23])
        self.succeed(self.export("units", "units-hf"))
        self.assert_generates("units", "units-hf")

    def test_what_is_refused(self):
        self.assert_all_refused(
            ("pruning.end=27", "pruning.end", "24 steps", "train.steps"),
            ("pruning.final_sparsity=1", "pruning.final_sparsity", "max_sparsity"),
            ("pruning.end=16", "pruning.end", "pruning.every"),
            ("pruning.magnitude=random", "pruning.magnitude", "scaled"),
            ("pruning.sparse_above=often", "pruning.sparse_above", '"auto"'),
            ("pruning.form=heads", "pruning.form", "units"),
            ("pruning.unit_multiple=16", "pruning.unit_multiple", "pruning.form = units"),
            ("pruning.form=units", "pruning.sparse_above", "pruning.form = weights"),
            ("pruning.form=units pruning.sparse_above=0.65 pruning.max_sparsity=1", "pruning.max_sparsity", "0.98"),
            ("pruning.product_weights=3", "pruning.product_weights"))
