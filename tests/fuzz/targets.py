"""What is run on a damaged input. A target gives how many bytes it read; it may raise `QuailError`."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

import quail
from tests.fuzz import seeds
from tests.fuzz.mutations import damaged, damaged_json

SMALL_FILE_BYTES = 1 << 20
"""What any file may take, however small: messages, regular expressions, the tables of a tokenizer."""


@dataclass(frozen=True)
class Case:
    """One damaged input.

    Attributes:
        shown: for messages.
        num_bytes: its size.
        run: reads it.
    """

    shown: bytes | str
    num_bytes: int
    run: Callable[[], None]


class Target:
    """A kind of input.

    Attributes:
        largest: bytes that reading may take at its peak, for an input of some size.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read_valid(self) -> None:
        """Reads what is not damaged, which must not be refused; imports and makes what is needed once."""
        raise NotImplementedError

    def case(self, random: Random) -> Case:
        """Draws an input."""
        raise NotImplementedError

    def largest(self, num_bytes: int) -> int:
        """Most bytes of memory at the peak for an input of a size."""
        return 10 * num_bytes + SMALL_FILE_BYTES

    def _write(self, name: str, raw: bytes) -> Path:
        path = self.folder / name
        path.write_bytes(raw)
        return path


class GGUF(Target):
    """GGUF files, down to the weights."""

    @cached_property
    def _seeds(self) -> list[seeds.Seed]:
        return [seeds.gguf_file("gpt2"), seeds.gguf_file("llama")]

    def read_valid(self) -> None:
        for seed in self._seeds:
            self._read(self._write("model.gguf", seed.raw))

    def case(self, random: Random) -> Case:
        seed = random.choice(self._seeds)
        raw = damaged(random, seed.raw, seed.fields)
        return Case(raw, len(raw), lambda: self._read(self._write("model.gguf", raw)))

    @staticmethod
    def _read(path: Path) -> None:
        import torch

        from quail.models import gguf
        from quail.models.gguf_file import read_gguf_header
        from quail.models.gguf_tokenizer import tokenizer_from_gguf
        from quail.models.outline import outline_of
        from quail.models.weights import check_finite, tensor_shapes

        file = read_gguf_header(path)
        config = gguf.config_from_gguf(file)
        outline_of(path.stem, "", config, tokenizer_from_gguf(file.metadata, str(path)))
        for name in tensor_shapes(config):
            check_finite(name, gguf.read_tensor(file, config, name, torch.float32), str(path))


class Folder(Target):
    """Model folders; subclasses damage one of their files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._write("config.json", json.dumps(seeds.config()).encode())
        self._write("tokenizer.json", json.dumps(seeds.tokenizer_fields()).encode())
        self._write("tokenizer_config.json", json.dumps(seeds.tokenizer_settings()).encode())

    def read_valid(self) -> None:
        self._map_weights()

    def _map_weights(self) -> None:
        from quail.models.safetensors_folder import find_weights, read_config

        weights = find_weights(self.folder, read_config(self.folder))
        for name in weights.places:
            weights.map(name).sum()


class Safetensors(Folder):
    """The weights of a folder."""

    @cached_property
    def _seed(self) -> seeds.Seed:
        return seeds.safetensors_file()

    @cached_property
    def _header(self) -> tuple[dict[str, Any], int]:
        return seeds.safetensors_header()

    def read_valid(self) -> None:
        self._map(self._seed.raw)

    def case(self, random: Random) -> Case:
        if random.random() < 0.5:
            raw = damaged(random, self._seed.raw, self._seed.fields)
        else:
            fields, size = self._header
            text = damaged_json(random, fields)
            raw = len(text).to_bytes(8, "little") + text + b"\0" * size
        return Case(raw[:4096], len(raw), lambda: self._map(raw))

    def _map(self, raw: bytes) -> None:
        self._write("model.safetensors", raw)
        self._map_weights()


class Index(Folder):
    """The index of a folder with two files of weights."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for part in (0, 1):
            self._write(f"model-{part}.safetensors", seeds.safetensors_file(part).raw)

    def read_valid(self) -> None:
        self._map(json.dumps(seeds.index()).encode())

    def case(self, random: Random) -> Case:
        raw = damaged_json(random, seeds.index())
        return Case(raw, len(raw), lambda: self._map(raw))

    def _map(self, raw: bytes) -> None:
        self._write("model.safetensors.index.json", raw)
        self._map_weights()


class Config(Folder):
    """`config.json`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._write("model.safetensors", seeds.safetensors_file().raw)

    def case(self, random: Random) -> Case:
        raw = damaged_json(random, seeds.config())
        return Case(raw, len(raw), lambda: self._map(raw))

    def _map(self, raw: bytes) -> None:
        self._write("config.json", raw)
        self._map_weights()

    def largest(self, num_bytes: int) -> int:
        """A few bytes may ask for thousands of layers, whose names are compared with those of the file."""
        return 10 * num_bytes + (1 << 24)


class TokenizerJson(Folder):
    """`tokenizer.json` and `tokenizer_config.json`."""

    def read_valid(self) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            self._outline(name, (self.folder / name).read_bytes())

    def case(self, random: Random) -> Case:
        if random.random() < 0.8:
            name, raw = "tokenizer.json", damaged_json(random, seeds.tokenizer_fields())
        else:
            name, raw = "tokenizer_config.json", damaged_json(random, seeds.tokenizer_settings())
        return Case(raw, len(raw), lambda: self._outline(name, raw))

    def _outline(self, name: str, raw: bytes) -> None:
        from quail.models.outline import outline_of
        from quail.models.safetensors_folder import read_config, read_tokenizer_source

        before = (self.folder / name).read_bytes()
        self._write(name, raw)
        try:
            source = read_tokenizer_source(self.folder)
            outline = outline_of("fuzz", "", read_config(self.folder), source)
            outline.tokenizer.encode_plain(["the thing, in 1984", "<|end|>\0\u0301"])
            if outline.chat is not None:
                outline.tokenizer.encode_control(outline.chat.opener)
        finally:
            self._write(name, before)


class SQL(Target):
    """Statements, bound and run with a stub in the engine's place."""

    _NUM_CASES_A_SESSION = 100

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._num_cases = 0
        self._session: quail.Session | None = None

    def read_valid(self) -> None:
        for text in seeds.STATEMENTS:
            self._run(text)

    def case(self, random: Random) -> Case:
        text = random.choice(seeds.STATEMENTS)
        for _ in range(random.choice((1, 1, 2, 5))):
            text = self._changed(random, text)
        return Case(text, len(text.encode(errors="replace")), lambda: self._run(text))

    @staticmethod
    def _changed(random: Random, text: str) -> str:
        at = random.randrange(len(text) + 1)
        match random.randrange(7):
            case 0:
                return text[:at] + text[at + random.randrange(1, 30) :]
            case 1:
                return text[:at]
            case 2 | 3:
                return text[:at] + random.choice(seeds.PIECES) + text[at:]
            case 4:
                other = random.choice(seeds.STATEMENTS)
                start = random.randrange(len(other))
                return text[:at] + other[start : start + random.randrange(1, 60)] + text[at:]
            case 5:
                depth = random.choice((2, 10, 300, 3000))
                opening, closing = random.choice(
                    (("(", ")"), ("NOT ", ""), ("[", "]"), ("(SELECT ", ")"), ("-", ""))
                )
                word = text.find("text", at)
                word = at if word < 0 else word
                return (
                    text[:word] + opening * depth + text[word : word + 4] + closing * depth + text[word + 4 :]
                )
            case _:
                return damaged(random, text.encode(errors="surrogatepass")).decode(errors="surrogateescape")

    def _run(self, text: str) -> None:
        self._open().sql(text).run(progress=False)

    def _open(self) -> quail.Session:
        from tests.shell.stub import StubEngine

        if self._session is None or self._num_cases % self._NUM_CASES_A_SESSION == 0:
            if self._session is not None:
                self._session.close()
            self._session = quail.Session(engine=StubEngine(_answer))
            rows = [{"id": i, "text": text} for i, text in enumerate((*seeds.TEXTS[:3], None))]
            self._session.register("docs", rows)
            self._session.sql("CREATE TABLE kept (id INTEGER)").run()
        self._num_cases += 1
        return self._session

    def largest(self, num_bytes: int) -> int:
        """A statement's tree holds about a kilobyte for each of its words."""
        return 2000 * num_bytes + (1 << 24)


def _answer(call: Any, arguments: tuple[str, ...]) -> Any:
    operator = call.operator.name
    labels = [category.label for category in call.categories]
    return {
        "IF": len(arguments[0]) % 2 == 0,
        "SCORE": 0.5,
        "CLASSIFY": labels[0] if labels else None,
        "PROBABILITIES": [(label, 1 / len(labels)) for label in labels],
    }[operator]


class Documents(Target):
    """Texts of every kind: through a table to the engine's side, and through the tokenizer and back."""

    @cached_property
    def _tokenizer(self) -> Any:
        from quail.models.tokenizer import Tokenizer, TokenizerSource
        from tests.models.tiny import tiny_tokenizer

        return Tokenizer(TokenizerSource(tiny_tokenizer(400).to_str()))

    def read_valid(self) -> None:
        for text in seeds.TEXTS:
            self._read(text)

    def case(self, random: Random) -> Case:
        raw = random.choice(seeds.TEXTS).encode()
        raw = damaged(random, raw) if random.random() < 0.9 else raw
        if random.random() < 0.05:
            raw = raw * random.choice((10, 100))
        text = raw.decode(errors=random.choice(("surrogateescape", "replace", "surrogatepass_or_replace")))
        return Case(text, len(raw), lambda: self._read(text))

    def _read(self, text: str) -> None:
        from quail.errors import RowError
        from quail.sources.frames import REPLACEMENT, to_frame

        whole = "".join(REPLACEMENT if "\ud800" <= each <= "\udfff" else each for each in text)
        assert to_frame("t", [{"text": text}]).data.column(0).to_pylist() == [whole], "a table changed a text"
        ids, offsets = self._tokenizer.encode_plain([whole, ""])
        assert offsets.tolist() == [0, len(ids), len(ids)]
        assert self._tokenizer.decode(ids.tolist()) == whole, (
            "a text changed on its way through the tokenizer"
        )
        assert len(ids) >= self._tokenizer.fewest_tokens(whole)
        if whole != text:
            try:
                self._tokenizer.encode_plain([text])
            except RowError:
                return
            raise AssertionError("a lone surrogate became tokens")

    def largest(self, num_bytes: int) -> int:
        return 40 * num_bytes + SMALL_FILE_BYTES


class Files(Target):
    """Parquet, CSV and JSON-lines files of documents."""

    @cached_property
    def _seeds(self) -> dict[str, bytes]:
        import io

        import pyarrow as pa
        import pyarrow.parquet as pq

        buffer = io.BytesIO()
        pq.write_table(pa.table({"id": range(len(seeds.TEXTS)), "text": seeds.TEXTS}), buffer)
        lines = [json.dumps({"id": i, "text": text}) for i, text in enumerate(seeds.TEXTS)]
        rows = [f'{i},"{text.replace(chr(34), chr(34) * 2)}"' for i, text in enumerate(seeds.TEXTS)]
        return {
            "docs.parquet": buffer.getvalue(),
            "docs.jsonl": "\n".join(lines).encode(),
            "docs.csv": "\n".join(["id,text", *rows]).encode(),
        }

    def read_valid(self) -> None:
        for name, raw in self._seeds.items():
            self._read(name, raw)

    def case(self, random: Random) -> Case:
        name, raw = random.choice(list(self._seeds.items()))
        raw = damaged(random, raw)
        return Case(name.encode() + b": " + raw, len(raw), lambda: self._read(name, raw))

    def _read(self, name: str, raw: bytes) -> None:
        from tests.shell.stub import StubEngine

        with quail.Session(engine=StubEngine(_answer)) as session:
            session.register("docs", self._write(name, raw))
            session.sql("SELECT count(*) FROM docs WHERE AI.IF(PROMPT('Good? {0}', text))").run(
                progress=False
            )

    def largest(self, num_bytes: int) -> int:
        return 40 * num_bytes + (1 << 24)


TARGETS: dict[str, type[Target]] = {
    "gguf": GGUF,
    "safetensors": Safetensors,
    "index": Index,
    "config": Config,
    "tokenizer": TokenizerJson,
    "sql": SQL,
    "documents": Documents,
    "files": Files,
}


def make(name: str) -> Target:
    """A target with a folder of its own, in memory where there is such a place."""
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    return TARGETS[name](Path(tempfile.mkdtemp(prefix="quail-fuzz-", dir=place)))
