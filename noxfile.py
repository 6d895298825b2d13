"""Every task of the project, each of which sets up all it needs: `nox -l` lists them.

One virtual environment, `.nox/shared`, serves all sessions: torch alone takes 1.4 GB (CPU) or 5 GB (CUDA), and a
second copy would buy nothing, since the versions are pinned in one place (the extras in pyproject.toml). It is made
by the first session that runs and reused until pyproject.toml changes. Three sessions make environments of their own:
`package` sees the project as a user's pip does, `release` has other tools, and `versions` other Pythons and torches.

What does not belong here: the work itself. A session installs, says what it is about to do, and calls one command.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = []
nox.options.error_on_external_run = False

ROOT = Path(__file__).parent
SHARED = ROOT / ".nox" / "shared"
PYTHON = str(SHARED / "bin" / "python")
TORCH = "torch==2.13.0"
EXTRAS = "docs,lint,notebook,test"
# `nox -s versions` runs the tests on each of these Pythons that is on the path, with each of these versions of torch.
PYTHONS = ("python3.11", "python3.12", "python3.13", "python3.14")
# The oldest supported torch, the one of CI, and the newest: the first of its names that can be installed.
TORCHES = ("torch==2.11.0", "torch==2.13.0", "torch==2.15.0 torch==2.14.1")
HTML = ROOT / "docs" / "_build" / "html"
LIGHTHOUSE = "12.8.2"
# The files that a host reads, by the name of the schema that check-jsonschema has of them.
SCHEMAS = {
    "github-workflows": (".github/workflows/*.yml",),
    "dependabot": (".github/dependabot.yml",),
    "github-issue-forms": (".github/ISSUE_TEMPLATE/[!c]*.yml",),
    "github-issue-config": (".github/ISSUE_TEMPLATE/config.yml",),
    "citation-file-format": ("CITATION.cff",),
}
MARKS = "not long and not benchmark and not browser and not deaths"


@contextlib.contextmanager
def step(session: nox.Session, number: int, of: int, what: str) -> Iterator[None]:
    """Say what is being done, every 20 seconds that it is still being done, and how long it took."""
    session.log(f"[{number}/{of}] {what}")
    started, done = time.monotonic(), threading.Event()

    def tick() -> None:
        while not done.wait(20):
            session.log(f"[{number}/{of}] ... still at it after {time.monotonic() - started:.0f} s")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
    session.log(f"[{number}/{of}] done in {time.monotonic() - started:.0f} s")


def pip(session: nox.Session, *args: str, python: str = PYTHON) -> None:
    """Run pip so that only errors are printed: its remarks on indexes and caches would bury the progress lines."""
    session.run(
        python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *args, external=True, silent=False
    )


def install_first(session: nox.Session, names: list[str], python: str) -> None:
    """Install the first of some releases that the index has for this Python; the error is that of the last."""
    *newer, last = names
    for name in newer:
        with contextlib.suppress(nox.command.CommandFailed):
            return pip(session, name, python=python)
    pip(session, last, python=python)


def fingerprint() -> str:
    """Change when the environment must be made anew."""
    text = (ROOT / "pyproject.toml").read_text() + TORCH + EXTRAS + sys.version
    return hashlib.sha256(text.encode()).hexdigest()


def set_up(session: nox.Session, of: int) -> None:
    """Steps 1 and 2 of every session: torch, then the rest, into the shared environment. Nothing if both are there."""
    stamp = SHARED / "complete"
    if stamp.exists() and stamp.read_text() == fingerprint():
        session.log(f"[1-2/{of}] the environment {SHARED.relative_to(ROOT)} is up to date")
        return
    stamp.unlink(missing_ok=True)
    with step(session, 1, of, f"installing {TORCH} into {SHARED.relative_to(ROOT)} (the longest download)"):
        made_with = SHARED / "python_version"
        if not (SHARED / "bin" / "pip").exists() or not made_with.exists() or made_with.read_text() != sys.version:
            session.run(sys.executable, "-m", "venv", "--clear", str(SHARED), external=True)
            made_with.write_text(sys.version)
        pip(session, TORCH)
    with step(session, 2, of, f"installing this project with the extras {EXTRAS}"):
        pip(session, "-e", f".[{EXTRAS}]")
    stamp.write_text(fingerprint())


def call(session: nox.Session, *args: str, python: str = PYTHON, codes: tuple[int, ...] = (0,)) -> None:
    """Run a command of the shared environment, one thread a rank, and keep its scratch files out of the user's home."""
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-") as scratch:
        homes = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "MPLCONFIGDIR")
        places = dict.fromkeys(homes, scratch)
        path = f"{Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        # Compiled files are kept, whatever the user's setting: hundreds of ranks load them, 0.2 s each otherwise.
        env = {**places, "OMP_NUM_THREADS": "1", "PATH": path, "PYTHONDONTWRITEBYTECODE": ""}
        session.run(python, *args, env=env, external=True, success_codes=codes)


@nox.session(venv_backend="none")
def docs(session: nox.Session) -> None:
    """The main job: run every tutorial on real ranks, then build the site into docs/_build/html."""
    set_up(session, 4)
    with step(session, 3, 4, "running the tutorials"):
        call(session, "docs/run_tutorials.py")
    with step(session, 4, 4, "building the site; any warning is an error"):
        call(session, "docs/keep_html.py")
        call(session, "docs/fetch_npm.py")
        # Most pages wait for the ranks of their examples: a second reader uses the time.
        build = ("-q", "-n", "-W", "--keep-going", "-j", "2", "-d", "docs/_build/doctrees")
        call(session, "-m", "sphinx", *build, "docs", str(HTML))
    session.log(f"The site: {HTML / 'index.html'}")


@nox.session(venv_backend="none")
def tutorials(session: nox.Session) -> None:
    """Run the tutorials again, all that can on a backend: `-- gloo`, `-- ref`, or `-- nccl` where there is a GPU."""
    set_up(session, 3)
    with step(session, 3, 3, "running the tutorials"):
        call(session, "docs/run_tutorials.py", "--again", "--backend", *(session.posargs or ["gloo"]))


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """The tests, on `ref` and `gloo`. Arguments after -- go to pytest."""
    set_up(session, 3)
    session.log("[3/3] running the tests")
    # Tests on the simulated device come late: it is compiled beside the first tests. Its errors are reported there.
    build = [PYTHON, "-m", "torchdist_ref.testing.simulated_device"]
    subprocess.Popen(build, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    # Most tests wait for ranks more than they compute: a second worker uses the time. A chosen few need none.
    # Those of types run in `types`, where mypy has read torch already.
    workers = [] if session.posargs else ["-n", "2", "--dist", "loadfile", "--ignore=tests/typed"]
    call(session, "-m", "pytest", *workers, "-m", MARKS, *session.posargs)


@nox.session(venv_backend="none")
def deaths(session: nox.Session) -> None:
    """Kill a rank at one in a hundred of the lines of each call; `nightly` takes more, `soak -- lines` all of them."""
    set_up(session, 3)
    with step(session, 3, 3, "killing ranks at lines of calls"):
        call(session, "-m", "pytest", "-q", "-n", "2", "-m", "deaths and not long", "tests/soak", *session.posargs)


@nox.session(venv_backend="none")
def long(session: nox.Session) -> None:
    """The tests that take minutes each."""
    set_up(session, 3)
    session.log("[3/3] running the long tests")
    call(session, "-m", "pytest", "-m", "long", *session.posargs)


@nox.session(venv_backend="none")
def site(session: nox.Session) -> None:
    """Test the site of `nox -s docs` in Chromium, which the system provides. Arguments after -- go to pytest."""
    set_up(session, 4)
    with step(session, 3, 4, "installing the browser's driver"):
        pip(session, "-e", ".[browser]")
    with step(session, 4, 4, "opening the site in a browser"):
        call(session, "-m", "pytest", "-q", "-m", "browser", "tests/docs", *session.posargs)


@nox.session(venv_backend="none", name="site-check")
def site_check(session: nox.Session) -> None:
    """Test every page of the site of `nox -s docs` in Chromium, in light and dark, on a desktop and a phone."""
    session.env["TORCHDIST_REF_EVERY_PAGE"] = "1"
    site(session)


@nox.session(venv_backend="none")
def lighthouse(session: nox.Session) -> None:
    """Rate four pages of the site of `nox -s docs` with Lighthouse, from npm; arguments after -- go to it."""
    set_up(session, 4)
    folder = ROOT / ".nox" / "lighthouse"
    with step(session, 3, 4, f"installing Lighthouse {LIGHTHOUSE}"):
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--silent")
        session.run("npm", "install", *quiet, "--prefix", str(folder), f"lighthouse@{LIGHTHOUSE}", external=True)
    with step(session, 4, 4, "rating pages, three times each"):
        call(session, "docs/lighthouse.py", str(folder / "node_modules" / "lighthouse"), *session.posargs)


@nox.session(venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Run all that needs a GPU, within ten minutes, and write gpu_report.json."""
    set_up(session, 3)
    session.log("[3/3] running everything that needs a GPU")
    call(session, "-m", "tests.gpu", *(session.posargs or ["--report", "gpu_report.json"]))


@nox.session(venv_backend="none")
def soak(session: nox.Session) -> None:
    """Proofs at length, whose results are a page of the site: all, or `-- NAME [--count N] [--seconds S]`.

    `-- lines` kills a rank at every line of every function that ranks run together; further arguments choose functions.
    It is run without arguments, too.
    """
    set_up(session, 3)
    first, *rest = session.posargs or [""]
    if first != "lines":
        session.log(
            "[3/3] proofs at length: parsers, sessions, histories, collectives, deaths, networks, hosts, restarts"
        )
        call(session, "-m", "tests.soak", *session.posargs)
    if first in ("", "lines"):
        session.log("[3/3] killing ranks at every line")
        call(session, "-m", "tests.soak.deaths", *rest)


@nox.session(venv_backend="none")
def versions(session: nox.Session) -> None:
    """Run the tests on each Python found with each supported torch, and record what passed in docs/versions.json.

    Arguments after -- choose: `-- python3.13 torch==2.13.0`, or `-- python3.13 oldest`, or `newest`. On Debian 13
    its own Python is 3.13.
    """
    pythons = [name for name in PYTHONS if name in session.posargs] or PYTHONS
    chosen = [{"oldest": TORCHES[0], "newest": TORCHES[-1]}.get(name, name) for name in session.posargs]
    torches = [name for name in chosen if name.startswith("torch==")] or TORCHES
    pairs = [(python, torch) for python in pythons if shutil.which(python) for torch in torches]
    failed = []
    for number, (python, torch) in enumerate(pairs, start=1):
        home = ROOT / ".nox" / "versions" / f"{python}-{torch.split()[0]}"
        with step(session, number, len(pairs), f"the tests on {python} with {torch}"):
            if not (home / "complete").exists():
                session.run(python, "-m", "venv", "--clear", str(home), external=True)
                install_first(session, torch.split(), str(home / "bin" / "python"))
                pip(session, "-e", ".[docs,notebook,test]", python=str(home / "bin" / "python"))
                (home / "complete").touch()
            inside, results = str(home / "bin" / "python"), str(home / "results.xml")
            call(session, "-m", "pytest", "-q", "-m", MARKS, f"--junitxml={results}", python=inside, codes=(0, 1))
            call(session, "-m", "tests.versions", results, python=inside, codes=(0, 1))
            outcomes = Path(results).read_text(encoding="utf-8")
            failed += [f"{python}, {torch}"] if "<failure" in outcomes or "<error" in outcomes else []
    for python in pythons:
        if not shutil.which(python):
            session.log(f"not run: {python} is not on the path")
    if failed:
        session.error(f"tests failed on {'; '.join(failed)}: see docs/versions.json")


@nox.session(venv_backend="none")
def lint(session: nox.Session) -> None:
    """Style, and the form of the files that a host of repositories reads."""
    set_up(session, 3)
    session.log("[3/3] ruff, and the schemas of the files of the host")
    call(session, "-m", "ruff", "check", ".")
    call(session, "-m", "ruff", "format", "--check", ".")
    for schema, files in SCHEMAS.items():
        found = [str(path.relative_to(ROOT)) for pattern in files for path in sorted(ROOT.glob(pattern))]
        call(session, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *found)


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Types: mypy, strict, on the package; mypy and pyright on programs of users, right and wrong."""
    set_up(session, 4)
    with step(session, 3, 4, "mypy --strict"):
        call(session, "-m", "mypy")
    session.log("[4/4] running the tests of types")
    call(session, "-m", "pytest", "-q", "tests/typed")


@nox.session(venv_backend="none")
def nightly(session: nox.Session) -> None:
    """Run what takes too long for each change, and record it in docs/nightly.json: all, or `-- STEP...`."""
    set_up(session, 4)
    with step(session, 3, 4, "installing the browser's driver"):
        pip(session, "-e", ".[browser]")
    session.log("[4/4] running the steps; those of the site need `nox -s docs` before")
    call(session, "-m", "tests.nightly", *session.posargs)


@nox.session(venv_backend="none")
def mutants(session: nox.Session) -> None:
    """Plant named faults in the library, and show that the tests notice each: all, `-- --changed`, or `-- WORDS`."""
    set_up(session, 3)
    session.log("[3/3] planting faults")
    call(session, "-m", "tests.mutants", *session.posargs)


@nox.session(venv_backend="none")
def bench(session: nox.Session) -> None:
    """Time the collectives. Arguments after -- go to the benchmark."""
    set_up(session, 3)
    session.log("[3/3] measuring")
    call(session, "-m", "torchdist_ref.benchmark", *session.posargs)


@nox.session(venv_backend="none")
def dev(session: nox.Session) -> None:
    """An environment to work in, with the project installed so that edits take effect at once."""
    set_up(session, 2)
    session.log(f"Now: source {SHARED.relative_to(ROOT) / 'bin' / 'activate'}")


@nox.session(venv_backend="none")
def package(session: nox.Session) -> None:
    """Build sdist and wheel, and install and import each in an environment that has never seen this folder."""
    set_up(session, 5)
    with step(session, 3, 5, "building sdist and wheel into dist"):
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        call(session, "-m", "build", "--outdir", "dist")
    for number, built in enumerate(sorted((ROOT / "dist").iterdir()), start=4):
        with step(session, number, 5, f"installing {built.name} in a clean environment"):
            try_install(session, built)


@nox.session(venv_backend="none")
def release(session: nox.Session) -> None:
    """Make a release: `-- VERSION [--checked]`, or only the files of one that is tagged: `-- files VERSION`.

    It runs `.ci/run` in a fresh clone (`--checked` if that has passed), writes version and changelog, builds twice and
    compares, lists the components, and tags. It uploads nothing. docs/explanation/releasing.md has the rest.
    """
    home = ROOT / ".nox" / "release"
    tools = nox.project.dependency_groups(nox.project.load_toml(ROOT / "pyproject.toml"), "release")
    with step(session, 1, 2, f"installing the tools into {home.relative_to(ROOT)}"):
        session.run(sys.executable, "-m", "venv", str(home), external=True)
        pip(session, *tools, python=str(home / "bin" / "python"))
    with step(session, 2, 2, "making the release"):
        call(session, ".ci/release.py", *session.posargs, python=str(home / "bin" / "python"))


def try_install(session: nox.Session, built: Path) -> None:
    """Install one built file where nothing else of ours is, borrow torch from the shared environment, and use it."""
    with tempfile.TemporaryDirectory(prefix="torchdist_ref-package-") as clean:
        python = str(Path(clean, "venv", "bin", "python"))
        session.run(sys.executable, "-m", "venv", str(Path(clean, "venv")), external=True)
        pip(session, "--no-deps", str(built), python=python)
        borrowed = next(SHARED.glob("lib/python*/site-packages"))
        pth = next(Path(clean).glob("venv/lib/python*/site-packages")) / "borrowed.pth"
        pth.write_text(f"{borrowed}\n")
        with session.chdir(clean):
            session.run(python, str(ROOT / "tests" / "docs" / "use_installed.py"), clean, external=True)
