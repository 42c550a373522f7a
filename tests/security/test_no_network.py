"""Once a model is here, nothing asks the network or starts a program that could."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quail.config import EngineConfig
from quail.models.registry import list_models
from tests.models.tiny import make_tiny

WITHOUT_NETWORK = """
import os, socket, subprocess, sys

def refused(*arguments, **options):
    raise SystemExit("the network or another program was asked for: " + str(arguments[-1])[:300])

for name in ("connect", "connect_ex", "bind", "sendto"):
    setattr(socket.socket, name, refused)
socket.create_connection = socket.getaddrinfo = socket.gethostbyname = refused
start = subprocess.Popen.__init__

def only_uname(process, command, *arguments, **options):
    if command[0] != "uname":  # the standard library asks it for the name of the processor
        process.returncode = None
        refused(command)
    start(process, command, *arguments, **options)

subprocess.Popen.__init__ = only_uname
os.system = os.posix_spawn = refused
"""
QUERY = """
import quail
with quail.Session(quail.EngineConfig(model=sys.argv[1], cache_dir=sys.argv[2], kv_memory="64MiB")) as session:
    session.register("docs", [{"text": "A fine film."}, {"text": "A dull one."}])
    query = session.sql("SELECT count(*), count(AI.SCORE(PROMPT('{0}\\n\\nSentiment:', text))) FROM docs")
    query.explain()
    assert query.run(progress=False).fetchall() == [(2, 2)]
"""
COMMAND = """
from quail.cli import main
os.environ["QUAIL_MODEL"], os.environ["QUAIL_CACHE_DIR"] = sys.argv[1], sys.argv[2]
os.environ["QUAIL_KV_MEMORY"] = "64MiB"
text = "SELECT AI.IF(PROMPT('{0}', text)) FROM docs"
sys.argv = ["quail", "sql", text, "--table", f"docs={sys.argv[3]}"]
main()
"""
SOCKETS = """
import pathlib
if pathlib.Path("/proc/self/fd").is_dir():
    links = [os.readlink(path) for path in pathlib.Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [link for link in links if link.startswith("socket:")], links
"""


def run_alone(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_NETWORK + code, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_guard_itself_guards() -> None:
    for code in (
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')",
        "subprocess.run(['true'])",
        "socket.socket().connect(('127.0.0.1', 9))",
    ):
        found = run_alone(code)
        assert found.returncode and "was asked for" in found.stderr


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table") / "docs.csv"
    path.write_text("id,text\n1,A fine film.\n2,A dull one.\n")
    return path


def models(folder: Path) -> list[tuple[str, str]]:
    """Models that are here, with their cache folders: a folder, and the default model if it was fetched."""
    tiny = make_tiny(folder / "tiny", "llama")
    found = [(str(tiny), str(folder / "cache"))]
    cache = EngineConfig().cache_path
    found += [(model.name, str(cache)) for model in list_models(cache) if model.path is not None]
    return found


def test_queries_and_the_command_work_without_network(tmp_path: Path, table: Path) -> None:
    for model, cache in models(tmp_path):
        for code in (QUERY, COMMAND):
            found = run_alone(code + SOCKETS, model, cache, str(table))
            assert found.returncode == 0, f"{model}: {found.stderr}"


def test_a_model_that_is_not_here_is_the_only_reason_to_fetch(tmp_path: Path) -> None:
    found = run_alone(QUERY, "owner/no-such-model", str(tmp_path))
    assert found.returncode
    assert "asked for" in found.stderr or "cannot be fetched" in found.stderr
