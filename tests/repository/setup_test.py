# SPDX-License-Identifier: Apache-2.0
"""scripts/setup on machines that lack something: a PATH of few commands, a stand-in for apt, wheels made here."""
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

SETUP = pathlib.Path(__file__).resolve().parents[2] / "scripts" / "setup"
STAND_INS = SETUP.parent / "torch-stand-ins"
TOOLS = "bash c++ cat chmod cp env flock mkdir mktemp mv rm sed tail touch".split()
PRESENT = "cmake ninja pkg-config python3".split()  # need only be there
NOBODY = 65534
LIBRARIES = ("libfmt-dev nlohmann-json3-dev libcli11-dev libtomlplusplus-dev libxxhash-dev libsentencepiece-dev libprotozero-dev "
             "libpcre2-dev libutf8proc-dev zlib1g-dev libzstd-dev libgtest-dev").split()
# Notes what it is asked for, and "installs" by making the command of the same name.
APT_GET = """#!/bin/bash
echo "apt-get $*" >>"$LOG"
for word; do case $word in ninja-build) touch "$BIN/ninja" && chmod +x "$BIN/ninja" ;; esac; done
"""


class Machine:
    """A folder of commands, the only ones that setup finds, and a user who is not root."""

    def __init__(self, without=()):
        self.folder = tempfile.TemporaryDirectory()
        self.root = pathlib.Path(self.folder.name)
        self.bin, self.log, self.cache = self.root / "bin", self.root / "log", self.root / "cache"
        for path in (self.bin, self.cache):
            path.mkdir()
        for tool in TOOLS:  # a machine with clang++ alone may lack the name c++
            (self.bin / tool).symlink_to(shutil.which(tool) or shutil.which(os.environ.get("CXX", "c++")))
        for tool in set(PRESENT) - set(without):
            self.add(tool, "#!/bin/bash\nexit 1\n")
        for name in ("scripts", "cmake"):
            (self.root / name).mkdir()
        self.setup = self.root / "scripts" / "setup"
        shutil.copy(SETUP, self.setup)
        shutil.copy(SETUP.parents[1] / "cmake" / "TorchVersions.cmake", self.root / "cmake")
        self.log.touch()
        self.give_away()

    def add(self, name, text):
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def give_away(self):
        """To the user of `start`; the checkout itself may lie where only root can read."""
        if os.geteuid() == 0:
            for path in [self.root, *self.root.rglob("*")]:
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)

    def start(self, *arguments, **variables):
        environment = {"PATH": str(self.bin), "HOME": str(self.root), "DYNMO_CACHE": str(self.cache), "LOG": str(self.log),
                       "BIN": str(self.bin), "LC_ALL": "C.UTF-8", **variables}
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        self.give_away()
        return subprocess.Popen([shutil.which("bash"), self.setup, *arguments], env=environment, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=self.root, **user)

    def run(self, *arguments, **variables):
        process = self.start(*arguments, **variables)
        out, errors = process.communicate(timeout=100)
        return process.returncode, out, errors

    def torch(self, version, library=True):
        """A folder that looks like an installed PyTorch."""
        folder = self.root / f"site-{version}" / "torch"
        (folder / "lib").mkdir(parents=True)
        (folder / "version.py").write_text(f"__version__ = '{version}+cu130'\n")
        if library:
            (folder / "lib" / "libtorch_cpu.so").touch()
        return str(folder)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.folder.cleanup()


class Packages(unittest.TestCase):
    def test_that_are_there_are_not_asked_for(self):
        with Machine() as machine:
            self.assertEqual(machine.run("core"), (0, "", ""))

    def test_are_named_without_root_and_sudo(self):
        with Machine(without=["ninja", "pkg-config"]) as machine:
            machine.add("apt-get", APT_GET)
            code, _, errors = machine.run("core")
            self.assertEqual(code, 2)
            self.assertEqual(errors.count("\n"), 1, errors)
            self.assertIn("apt-get install ninja-build pkg-config\n", errors)
            self.assertEqual(machine.log.read_text(), "")

    def test_of_headers_are_named(self):
        with Machine() as machine:
            machine.add("apt-get", APT_GET)
            code, _, errors = machine.run("core", CXX=f"c++ -nostdinc -I{machine.cache}")
            self.assertEqual(code, 2)
            named = errors.split("apt-get install ")[1].split()
            self.assertEqual(sorted(named), sorted(LIBRARIES))

    def test_are_named_where_there_is_no_apt(self):
        with Machine(without=["ninja"]) as machine:
            code, _, errors = machine.run("core")
            self.assertEqual((code, errors.count("\n")), (2, 1), errors)
            self.assertIn("missing: ninja-build (Debian's names)", errors)

    def test_are_installed_once_through_sudo(self):
        with Machine(without=["ninja"]) as machine:
            machine.add("apt-get", APT_GET)
            machine.add("apt-cache", "#!/bin/bash\nexit 0\n")
            machine.add("sudo", '#!/bin/bash\n[[ $1 == -n ]] && exit 0\necho -n "sudo " >>"$LOG"\nexec "$@"\n')
            code, _, errors = machine.run("core")
            self.assertEqual((code, errors), (0, "setup: installing ninja-build ccache\n"))
            asked = machine.log.read_text().splitlines()
            self.assertEqual([line.split()[-1] for line in asked], ["update", "ccache", "clean"])
            self.assertTrue(all(line.startswith("sudo apt-get -y ") for line in asked), asked)
            self.assertIn("install --no-install-recommends ninja-build ccache", asked[1])
            self.assertEqual(machine.run("core"), (0, "", ""))
            self.assertEqual(machine.log.read_text().splitlines(), asked)

    def test_that_apt_does_not_know_bring_up_universe(self):
        with Machine(without=["ninja"]) as machine:
            machine.add("apt-get", APT_GET)
            machine.add("apt-cache", "#!/bin/bash\nexit 100\n")
            machine.add("sudo", '#!/bin/bash\n[[ $1 == -n ]] && exit 0\nexec "$@"\n')
            code, _, errors = machine.run("core")
            self.assertEqual(code, 2)
            self.assertIn("add-apt-repository universe", errors.splitlines()[-1])
            self.assertNotIn(" install ", machine.log.read_text())

    def test_of_a_part_that_does_not_exist(self):
        with Machine() as machine:
            code, _, errors = machine.run("cors")
            self.assertEqual((code, errors), (2, "setup: unknown part 'cors', wanted core, runtime, python, torch, check, bench, peers, report, wheel or site\n"))


def make_wheel(folder, name, version, files, extras=()):
    information = f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" + "".join(f"Provides-Extra: {e}\n" for e in extras)
    files = files | {f"{information}/METADATA": metadata.encode(),
                     f"{information}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"}
    files[f"{information}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{information}/RECORD"]).encode()
    with zipfile.ZipFile(folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl", "w") as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)


class WheelCase(unittest.TestCase):
    """A machine whose pip finds the wheels of a folder and no others."""

    def setUp(self):
        self.machine = Machine()
        self.addCleanup(self.machine.folder.cleanup)
        self.wheels = self.machine.root / "wheels"
        self.wheels.mkdir()
        self.pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(self.wheels), "PIP_CONFIG_FILE": "/dev/null"}

    def need_venv(self, more=""):
        if subprocess.run(["/usr/bin/python3", "-c", "import ensurepip, venv" + more], capture_output=True, check=False).returncode != 0:
            self.skipTest("the system's python3 has no headers or cannot make virtual environments")

    def assert_no_download_leaves_nothing(self, part, lock, said="check the network"):
        code, _, errors = self.machine.run(part, **self.pip)
        self.assertEqual(code, 2)
        self.assertIn(said, errors.splitlines()[-1])
        self.assertEqual([path.name for path in self.machine.cache.iterdir()], [lock])


class Libtorch(WheelCase):
    def setUp(self):
        if not pathlib.Path("/usr/include/spdlog").is_dir():
            self.skipTest("libspdlog-dev is not installed, as for a build of the core alone")
        super().setUp()

    def add_wheels(self, library, version="2.11.0", toolkit="13.0.2"):
        make_wheel(self.wheels, "torch", version, {"torch/version.py": f"__version__ = '{version}+cu130'\n".encode(),
                                                   "torch/lib/libtorch_cpu.so": library})
        make_wheel(self.wheels, "cuda-toolkit", toolkit, {"nvidia/x": b""}, extras=("cudart", "cupti"))

    def test_that_the_user_named_is_taken(self):
        for version in ("2.11.3", "2.13.0", "2.15.1"):
            self.assertEqual(self.machine.run("runtime", DYNMO_TORCH_DIR=self.machine.torch(version)), (0, "", ""))

    def test_that_the_user_named_wrongly_is_refused_in_one_line(self):
        rubbish = str(self.machine.root / "nothing")
        others = [(self.machine.torch(version), version) for version in ("2.8.0", "2.16.0", "2.111.0", "3.12.0")]
        for folder, version in [(rubbish, ""), *others, (self.machine.torch("2.11.1", library=False), "")]:
            code, _, errors = self.machine.run("runtime", DYNMO_TORCH_DIR=folder)
            self.assertEqual((code, errors.count("\n")), (2, 1), errors)
            self.assertIn(f"DYNMO_TORCH_DIR is '{folder}' with PyTorch '{version}', wanted the folder 'torch' of an "
                          "installed PyTorch 2.11 to 2.15", errors)

    def test_version_of_which_there_is_no_copy_is_refused(self):
        code, _, errors = self.machine.run("core", DYNMO_TORCH_VERSION="2.12")
        self.assertEqual((code, errors.count("\n")), (2, 1), errors)
        self.assertIn("DYNMO_TORCH_VERSION is '2.12', wanted one of 2.11, 2.15: correct it, or set DYNMO_TORCH_DIR", errors)

    def test_of_another_version_is_another_copy(self):
        self.need_venv()
        self.add_wheels(b"", "2.15.0", "13.2.2")
        code, _, errors = self.machine.run("runtime", DYNMO_TORCH_VERSION="2.15", **self.pip)
        self.assertEqual(code, 2)
        self.assertIn("downloading PyTorch 2.15.0", errors)
        self.assertIn("does not load", errors.splitlines()[-1])  # an empty file

    def test_that_python3_has_is_taken(self):
        self.machine.add("python3", f"#!/bin/bash\necho '{self.machine.torch('2.11.0')}'\n")
        self.assertEqual(self.machine.run("runtime"), (0, "", ""))

    def test_is_made_once_by_two_at_a_time(self):
        self.need_venv()
        library = self.machine.root / "library.so"
        subprocess.run(["c++", "-shared", "-x", "c++", "/dev/null", "-o", library], check=True)
        self.add_wheels(library.read_bytes())
        left = self.machine.cache / ".torch-2.11.0.partial" / "from a run that was interrupted"
        left.mkdir(parents=True)
        both = [self.machine.start("runtime", **self.pip) for _ in range(2)]
        said = "".join(process.communicate(timeout=200)[1] for process in both)
        self.assertEqual([process.returncode for process in both], [0, 0], said)
        self.assertEqual(said.count("downloading"), 1, said)
        made = list(self.machine.cache.glob("torch-2.11.0/lib/python3*/site-packages/torch/lib/libtorch_cpu.so"))
        self.assertEqual(len(made), 1)
        self.assertFalse(left.parent.exists())
        self.assertEqual(self.machine.run("runtime", **self.pip), (0, "", ""))

    def test_that_cannot_be_downloaded_leaves_nothing_behind(self):
        self.need_venv()
        self.assert_no_download_leaves_nothing("runtime", ".torch.lock", "setup: pip could not download PyTorch 2.11.0 (above): check the network")

    def test_that_does_not_load_is_not_taken(self):
        self.need_venv()
        self.add_wheels(b"not a library")
        code, _, errors = self.machine.run("runtime", **self.pip)
        self.assertEqual(code, 2)
        self.assertIn("does not load", errors.splitlines()[-1])
        self.assertFalse((self.machine.cache / "torch-2.11.0").exists())


def stand_in_user(folder):
    """A library that is linked with two of CUDA that nobody has, one with versions."""
    code = {"cufake": "void cufake_x(void) {}", "nvfake": "void nvfake_x(void) {}"}
    subprocess.run(["cc", "-shared", "-x", "c", "/dev/null", "-o", folder / "empty.so"], check=True)
    (folder / "versions").write_text("libcufake.so.1 { global: cufake_x; };")
    for name, text in code.items():
        (folder / f"{name}.c").write_text(text)
        script = ["-Wl,--version-script=" + str(folder / "versions")] if name == "cufake" else []
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,lib{name}.so.1", *script, folder / f"{name}.c", "-o",
                        folder / f"lib{name}.so.1"], check=True)
    user = folder / "user.c"
    user.write_text("void cufake_x(void); void nvfake_x(void); void use(void) { cufake_x(); nvfake_x(); }")
    subprocess.run(["cc", "-shared", "-fPIC", user, folder / "libcufake.so.1", folder / "libnvfake.so.1", "-o", folder / "user.so"],
                   check=True)
    return (folder / "user.so").read_bytes()


class Python(WheelCase):
    """The environment of the Python package, from wheels made here."""

    def setUp(self):
        super().setUp()
        self.need_venv(", os, sysconfig; os.stat(sysconfig.get_path('include') + '/Python.h')")

    def test_is_made_once(self):
        for name, version in [("nanobind", "3.1.0"), ("scikit-build-core", "1.1.2"), ("numpy", "2.4.6")]:
            make_wheel(self.wheels, name, version, {f"{name.replace('-', '_')}/__init__.py": b""})
        code, _, errors = self.machine.run("python", **self.pip)
        self.assertEqual((code, errors.count("\n")), (0, 1), errors)
        self.assertTrue(list(self.machine.cache.glob("python/lib/python3*/site-packages/nanobind/__init__.py")))
        self.assertEqual(self.machine.run("python", **self.pip), (0, "", ""))

    def test_that_cannot_be_downloaded_leaves_nothing_behind(self):
        self.assert_no_download_leaves_nothing("python", ".python.lock")

    def test_has_one_more_with_pytorch(self):
        # A PyTorch whose import opens its library, as the real one's does.
        tag = subprocess.run(["/usr/bin/python3", "-c", "import sys; print('cpython-%d%d' % sys.version_info[:2])"], capture_output=True,
                             text=True, check=True).stdout.strip()
        library = stand_in_user(self.machine.root)
        opens = b"import ctypes, os; ctypes.CDLL(os.path.dirname(__file__) + '/lib/libtorch_python.so', os.RTLD_NOW)\n"
        make_wheel(self.wheels, "torch", "2.11.0", {
            "torch/version.py": b"__version__ = '2.11.0+cu130'\n", "torch/__init__.py": opens, f"torch/_C.{tag}-x.so": b"",
            "torch/lib/libtorch_cpu.so": (self.machine.root / "empty.so").read_bytes(), "torch/lib/libtorch_python.so": library})
        make_wheel(self.wheels, "cuda-toolkit", "13.0.2", {"nvidia/x": b""}, extras=("cudart", "cupti"))
        for name, version in [("nanobind", "3.1.0"), ("scikit-build-core", "1.1.2"), ("numpy", "2.4.6"), ("transformers", "5.23.0"), ("mypy", "2.4.0"),
                              ("accelerate", "1.15.0"), ("psutil", "7"), ("nvidia-cuda-nvrtc", "13.0.88"),
                              ("sympy", "1"), ("networkx", "1"), ("jinja2", "1"), ("fsspec", "1"), ("filelock", "1"),
                              ("typing-extensions", "5")]:
            make_wheel(self.wheels, name, version, {f"{name.replace('-', '_')}/__init__.py": b""})
        shutil.copy(STAND_INS, self.machine.setup.parent)
        for tool in ("as", "ld", "nm", "readelf"):
            (self.machine.bin / tool).symlink_to(shutil.which(tool))
        code, _, errors = self.machine.run("torch", **self.pip)
        self.assertEqual((code, errors.count("downloading")), (0, 3), errors)
        self.assertTrue((self.machine.cache / "python-torch" / "stand-ins" / "libcufake.so.1").exists())
        self.assertEqual(self.machine.run("torch", **self.pip), (0, "", ""))


class Report(WheelCase):
    """What `dynmo report --html` draws with: a wheel that is not one of those that were checked is refused."""

    def setUp(self):
        super().setUp()
        self.need_venv()
        make_wheel(self.wheels, "vl-convert-python", "1.9.0.post1", {"vl_convert.py": b"def javascript_bundle():\n    return 'vega'\n"})
        self.wheel = next(self.wheels.iterdir())
        self.sha256 = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.report = self.machine.cache / "report"

    def test_of_another_digest_is_refused_in_one_line(self):
        self.report.mkdir()
        (self.report / "vega.js").write_text("of an older version")
        code, _, errors = self.machine.run("report", **self.pip)
        said, refused = errors.splitlines()
        self.assertEqual(code, 2)
        self.assertIn("downloading vl-convert", said)
        self.assertIn(f"has sha256 {self.sha256}, wanted one of", refused)
        self.assertEqual(sorted(path.name for path in self.machine.cache.iterdir()), [".report.lock", "report"])
        self.assertEqual((self.report / "vega.js").read_text(), "of an older version")

    def test_of_the_digest_is_installed_once(self):
        setup = self.machine.setup.read_text()
        pinned = re.search(r"vl_convert_wheels=\(([0-9a-f]{64})\s+([0-9a-f]{64})\)", setup)
        self.machine.setup.write_text(setup.replace(pinned.group(2), self.sha256))
        code, _, errors = self.machine.run("report", **self.pip)
        self.assertEqual((code, errors.count("\n")), (0, 1), errors)
        self.assertEqual((self.report / "vega.js").read_text(), "vega\n")
        self.assertTrue((self.report / "bin/python").exists())
        self.assertEqual(self.machine.run("report", **self.pip), (0, "", ""))
        # Another wheel is wanted now.
        self.machine.setup.write_text(setup)
        code, _, errors = self.machine.run("report", **self.pip)
        self.assertEqual((code, errors.count("\n")), (2, 2), errors)

    def test_that_cannot_be_downloaded_leaves_nothing_behind(self):
        self.wheel.unlink()
        self.assert_no_download_leaves_nothing("report", ".report.lock")


if __name__ == "__main__":
    sys.exit(unittest.main())
