# SPDX-License-Identifier: Apache-2.0
"""A folder of dynmo/ includes only those above it in the map, only those below the line know libtorch, and none grows out of hand."""
import pathlib
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
INCLUDE = re.compile(r'^\s*#\s*include\s+([<"])([^>"]+)[>"]', re.MULTILINE)
LIBTORCH = re.compile(r"^(ATen|torch|c10|caffe2|gloo|nccl)(/|\.h$)")
WHOLE_LIBTORCH = re.compile(r"^torch/(torch|all|extension)\.h$")


def folder_map(root):
    """(folders of dynmo::core, folders of dynmo::runtime), each in the order of the map, as the build has them."""
    text = (root / "CMakeLists.txt").read_text()
    return tuple([folder for found in re.findall(rf"dynmo_(?:library|add_folders)\({name} ([^)]*)\)", text) for folder in found.split()]
                 for name in ("core", "runtime"))


def room(parts, order):
    """The place of a file in the map `order`: its folder, or the one above. dynamism/training is that of each source's half in a
    training."""
    if parts[1] == "dynamism" and "training" in parts[2:-1]:
        return "dynamism/training"
    inner = "/".join(parts[1:3])
    return inner if inner in order else parts[1]


MOST_LINES = 500  # of a file
MOST_FILES = 55  # of a folder
MOST_MEMBERS = 12  # of a class
SMALL_HEADER = 35  # lines, from which a header is worth a file
MOST_SMALL_HEADERS = 80  # only falls
CLASS = re.compile(r"\bclass (\w+)[^;{}()]*\{")
MEMBER = re.compile(r"\b[a-z]\w*_(?= = |;|\{)")


def classes(text):
    """(name, data members) of each class of a C++ text: names that end in _ and are declared at the class's own level."""
    text = re.sub(r"//[^\n]*", "", text)
    for found in CLASS.finditer(text):
        depth, at, own = 1, found.end(), ""
        while depth and at < len(text):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            own += text[at] if depth == 1 or text[at] == "{" else ""
            at += 1
        declarations = re.findall(r"[^;{}]*(?:;|\{)", own)
        yield found[1], {name for line in declarations if "(" not in line.split(" = ")[0] for name in MEMBER.findall(line)[:1]}


def sizes(root, tops=("apps", "bench", "dynmo", "python", "tests")):
    """Files and folders that are larger than one can hold in mind."""
    found = []
    for folder in sorted(path for top in tops for path in [root / top, *(root / top).rglob("*/")] if path.is_dir()):
        files = [path for path in sorted(folder.iterdir()) if path.suffix in (".h", ".cpp", ".cu", ".py")]
        if len(files) > MOST_FILES:
            found.append(f"{folder.relative_to(root)}: {len(files)} files, wanted {MOST_FILES} at most")
        for path in files:
            text = path.read_text()
            if text.count("\n") > MOST_LINES:
                found.append(f"{path.relative_to(root)}: {text.count(chr(10))} lines, wanted {MOST_LINES} at most")
            if path.suffix == ".py" or folder.parts[len(root.parts)] == "tests":
                continue
            for name, members in classes(text):
                if len(members) > MOST_MEMBERS:
                    found.append(f"{path.relative_to(root)}: class {name}: {len(members)} members, wanted {MOST_MEMBERS} at most")
    return found


def small_headers(root, tops=("apps", "dynmo", "python")):
    return [str(path.relative_to(root)) for top in tops for path in sorted((root / top).rglob("*.h"))
            if path.read_text().count("\n") < SMALL_HEADER]


def violations(root):
    core, runtime = folder_map(root)
    order = core + runtime
    found = []
    folders = {path.name for path in (root / "dynmo").iterdir() if path.is_dir()}
    found += [f"dynmo/{name}: not in the folder map of CMakeLists.txt" for name in sorted(folders - set(order))]
    for path in sorted((root / "dynmo").rglob("*")):
        if path.suffix not in (".h", ".cpp", ".cu") or path.relative_to(root).parts[1] not in order:
            continue
        folder, where = room(path.relative_to(root).parts, order), path.relative_to(root)
        for bracket, name in INCLUDE.findall(path.read_text()):
            parts = tuple(name.split("/"))
            if LIBTORCH.match(name) and folder in core:
                found.append(f"{where}: {name}: dynmo::core knows nothing of libtorch")
            elif WHOLE_LIBTORCH.match(name) and path.suffix == ".h":
                found.append(f"{where}: {name}: seconds an include; take ATen/core/Tensor.h or hide it in the source")
            elif parts[0] in ("apps", "tests", "bench"):
                found.append(f"{where}: {name}: the library includes nothing that uses it")
            elif parts[0] == "dynmo" and bracket == "<":
                found.append(f"{where}: {name}: our own headers are included with quotes")
            elif parts[0] == "dynmo" and parts[1] not in order:
                found.append(f"{where}: {name}: no such folder in the map")
            elif parts[0] == "dynmo" and order.index(room(parts, order)) > order.index(folder):
                found.append(f"{where}: {name}: {room(parts, order)} is below {folder} in the map")
            elif parts[0] == "dynmo" and name.endswith("_impl.h") and parts[1] != where.parts[1]:
                found.append(f"{where}: {name}: private to dynmo/{parts[1]}")
    return found


class Includes(unittest.TestCase):
    def test_follow_the_folder_map(self):
        self.assertEqual(violations(ROOT), [])

    def test_and_files_folders_and_classes_stay_small(self):
        self.assertEqual(sizes(ROOT), [])

    def test_of_what_is_too_large_are_found(self):
        with tempfile.TemporaryDirectory() as name:
            root = pathlib.Path(name)
            (root / "dynmo/core").mkdir(parents=True)
            (root / "dynmo/core/long.h").write_text("\n" * (MOST_LINES + 1))
            (root / "dynmo/core/short.h").write_text("\n" * MOST_LINES)
            members = "".join(f"  std::map<int, int> m{i}_ = {{}};\n  int f{i}() {{ return m{i}_; }}\n" for i in range(MOST_MEMBERS))
            (root / "dynmo/core/wide.h").write_text(f"class Fits final {{\n{members}}};\nclass Wide : Fits {{\n{members}  Fits last_{{3}};\n}};\n")
            (root / "tests").mkdir()
            for i in range(MOST_FILES + 1):
                (root / f"tests/f{i}.py").write_text("")
            self.assertEqual(sizes(root), [f"dynmo/core/long.h: {MOST_LINES + 1} lines, wanted {MOST_LINES} at most",
                                           f"dynmo/core/wide.h: class Wide: {MOST_MEMBERS + 1} members, wanted {MOST_MEMBERS} at most",
                                           f"tests: {MOST_FILES + 1} files, wanted {MOST_FILES} at most"])

    def test_and_few_headers_are_small(self):
        found = small_headers(ROOT)
        self.assertLessEqual(len(found), MOST_SMALL_HEADERS, "join some with the header of their users: " + ", ".join(found))

    def test_that_are_small_are_counted(self):
        with tempfile.TemporaryDirectory() as name:
            root = pathlib.Path(name)
            for path, lines in (("dynmo/core/a.h", SMALL_HEADER - 1), ("dynmo/core/b.h", SMALL_HEADER), ("apps/c.h", 1), ("tests/d.h", 1), ("dynmo/e.cpp", 1)):
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_text("\n" * lines)
            self.assertEqual(small_headers(root), ["apps/c.h", "dynmo/core/a.h"])

    def test_of_every_folder_are_looked_at(self):
        core, runtime = folder_map(ROOT)
        self.assertEqual((core[0], core[-1], runtime[-1]), ("core", "elastic", "train"))

    def test_against_the_map_are_found(self):
        planted = {
            "dynmo/core/a.h": ("#include <ATen/core/Tensor.h>", "knows nothing of libtorch"),
            "dynmo/core/b.cpp": ('#include "dynmo/plan/plan.h"', "plan is below core"),
            "dynmo/data/c.cpp": ("#  include <c10/util/x.h>", "knows nothing of libtorch"),
            "dynmo/plan/d.h": ('#include "dynmo/sim/replay_impl.h"', "private to dynmo/sim"),
            "dynmo/model/e.h": ("#include <torch/torch.h>", "seconds an include"),
            "dynmo/model/f.cpp": ('#include "dynmo/train/trainer.h"', "train is below model"),
            "dynmo/cost/g.h": ("#include <dynmo/core/ids.h>", "with quotes"),
            "dynmo/cost/h.h": ('#include "dynmo/nowhere/ids.h"', "no such folder"),
            "dynmo/sim/i.cpp": ('#include "tests/sim/oracle.h"', "nothing that uses it"),
            "dynmo/dynamism/moe/load.cpp": ('#include "dynmo/dynamism/training/source.h"', "dynamism/training is below dynamism in"),
            "dynmo/dynamism/moe/select.cpp": ("#include <ATen/ATen.h>", "knows nothing of libtorch"),
            "dynmo/dynamism/moe/options.h": ('#include "dynmo/dynamism/moe/training/router.h"', "dynamism/training is below dynamism"),
            "dynmo/dynamism/moe/training/router.cpp": ('#include "dynmo/runtime/engine.h"', "runtime is below dynamism/training"),
            "dynmo/model/m.cpp": ('#include "dynmo/dynamism/training/source.h"', "dynamism/training is below model"),
            "dynmo/train/setup/m.h": ('#include "dynmo/train/run.h"', "train is below train/setup"),
            "dynmo/extra/j.h": ("", "not in the folder map"),
        }
        innocent = {
            "dynmo/model/k.cpp": '#include <torch/torch.h>\n#include "dynmo/core/ids.h"\n',
            "dynmo/dynamism/moe/training/source.cpp": '#include <ATen/ATen.h>\n#include "dynmo/dynamism/moe/load.h"\n#include "dynmo/model/k.h"\n',
            "dynmo/runtime/n.cpp": '#include "dynmo/dynamism/training/source.h"\n',
            "dynmo/train/o.cpp": '#include "dynmo/train/setup/resolved_run.h"\n#include "dynmo/train/run_impl.h"\n',
            "dynmo/sim/l.cpp": '#include "dynmo/sim/replay_impl.h"\n#include <vector>\n',
        }
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "CMakeLists.txt").write_text((ROOT / "CMakeLists.txt").read_text())
            for name, text in innocent.items() | {name: line + "\n" for name, (line, _) in planted.items()}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            found = violations(root)
        self.assertEqual(len(found), len(planted), "\n".join(found))
        for name, (_, why) in planted.items():
            place = str(pathlib.Path(name).parent if name.startswith("dynmo/extra") else name)
            self.assertTrue(any(line.startswith(place + ":") and why in line for line in found), (name, found))


if __name__ == "__main__":
    sys.exit(unittest.main())
