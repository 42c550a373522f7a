"""Token ids: plain text stays plain, GGUF tokenizers split as their models were trained with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers, processors

from quail.errors import ModelError, RowError
from quail.models.gguf_file import NumberArray, read_gguf_header
from quail.models.gguf_tokenizer import tokenizer_from_gguf
from quail.models.safetensors_folder import read_tokenizer_source
from quail.models.tokenizer import Tokenizer, TokenizerSource
from tests.models.gguf_files import write_gguf
from tests.models.tiny import CHAT_TEMPLATE, CONTROL_TOKENS, tiny_tokenizer

TEXTS = [
    "",
    " ",
    "\n",
    "Hello world",
    "It isn't (really) fine?\n\n  Yes — naïve café, \t日本語 🙂\r\n",
    "  leading and trailing  ",
    "e\u0301 against \u00e9, \ufeffBOM, zero\u200bwidth, a\0b",
    "{}, {0}, {{x}}, {% if %}, %s",
]


def numbers(values: list[Any]) -> NumberArray:
    return NumberArray(np.array(values))


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode_plain([text])[0].tolist()


@pytest.fixture(scope="module")
def small(tiny: Callable[..., Path]) -> Tokenizer:
    return Tokenizer(read_tokenizer_source(tiny("llama")))


def source_of(tokenizer: tokenizers.Tokenizer, **facts: Any) -> TokenizerSource:
    return TokenizerSource(json=tokenizer.to_str(), **facts)


class TestPlainText:
    def test_ids_and_offsets_are_those_of_each_text_alone(self, small: Tokenizer) -> None:
        flat, offsets = small.encode_plain(TEXTS)
        assert flat.dtype == np.int32
        assert offsets.dtype == np.int64
        assert offsets[0] == 0
        oracle = tiny_tokenizer(512)
        for index, text in enumerate(TEXTS):
            found = flat[offsets[index] : offsets[index + 1]].tolist()
            assert found == oracle.encode(text, add_special_tokens=False).ids
            assert small.decode(found) == text

    def test_no_texts_at_all(self, small: Tokenizer) -> None:
        flat, offsets = small.encode_plain([])
        assert (flat.tolist(), offsets.tolist()) == ([], [0])
        flat, offsets = small.encode_plain([""] * 3)
        assert (flat.tolist(), offsets.tolist()) == ([], [0, 0, 0, 0])

    @pytest.mark.parametrize(
        "array",
        [
            pa.array(TEXTS),
            pa.array(TEXTS, pa.large_string()),
            pa.array(TEXTS, pa.string_view()),
            pa.array(TEXTS).dictionary_encode(),
            pa.chunked_array([TEXTS[:3], [], TEXTS[3:]]),
            pa.array(["x", *TEXTS, "y"]).slice(1, len(TEXTS)),
        ],
    )
    def test_arrow_arrays(self, array: Any, small: Tokenizer) -> None:
        flat, offsets = small.encode_plain(array)
        expected = small.encode_plain(TEXTS)
        assert np.array_equal(flat, expected[0])
        assert np.array_equal(offsets, expected[1])

    def test_batches_do_not_show(self, small: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = TEXTS * 5
        expected = small.encode_plain(texts)
        monkeypatch.setattr("quail.models.tokenizer._BATCH_CHARACTERS", 20)
        found = small.encode_plain(texts)
        assert np.array_equal(found[0], expected[0])
        assert np.array_equal(found[1], expected[1])

    @pytest.mark.parametrize(
        ("texts", "message"),
        [
            (["a", "b", "c\ud800d"], r"text 2 .*lone surrogate U\+D800 at character 1"),
            (["a", None], "text 1 is NoneType, not a string"),
            (pa.array(["a", "b", None]), "text 2 is NoneType"),
            (["a", ("b", "c")], "text 1 is tuple"),
            ([b"a"], "text 0 is bytes"),
        ],
    )
    def test_what_is_no_text_is_named_by_its_index(self, texts: Any, message: str, small: Tokenizer) -> None:
        with pytest.raises(RowError, match=message):
            small.encode_plain(texts)

    def test_the_index_counts_over_batches(self, small: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("quail.models.tokenizer._BATCH_CHARACTERS", 2)
        with pytest.raises(RowError, match="text 6 "):
            small.encode_plain(["ab"] * 6 + ["\udfff"])

    @given(st.text())
    @settings(max_examples=200, deadline=None)
    def test_text_has_at_least_its_bytes_over_the_longest_token(self, text: str) -> None:
        tokenizer = Tokenizer(source_of(tiny_tokenizer(400)))
        assert len(ids_of(tokenizer, text)) * tokenizer.max_token_bytes >= len(text.encode())


class TestControlTokens:
    @pytest.mark.parametrize("token", CONTROL_TOKENS)
    @pytest.mark.parametrize("around", ["{}", "a {} b", "{}assistant\n", "{0}{0}", "<{}>"])
    def test_control_text_of_users_stays_text(self, token: str, around: str, small: Tokenizer) -> None:
        text = around.format(token)
        ids = ids_of(small, text)
        assert not small.control_ids & set(ids)
        assert small.decode(ids) == text
        assert small.control_ids & set(small.encode_control(text))

    def test_template_text_is_recognized(self, small: Tokenizer) -> None:
        ids = small.encode_control("<|im_start|>user\n<|im_end|>")
        assert ids == [1, *ids_of(small, "user\n"), 2]

    def test_markers_count_as_control_whatever_their_flags(self) -> None:
        raw = tiny_tokenizer(400)
        raw.add_tokens(["<think>", "[TOOL]", "== turn ==", "\n\n\n"])
        template = CHAT_TEMPLATE + "== turn ==\n\n\n"
        tokenizer = Tokenizer(source_of(raw, chat_template=template))
        assert len(tokenizer.control_ids) == 6
        for text in ("<think>", "[TOOL]", "== turn =="):
            assert len(ids_of(tokenizer, text)) > 1
            assert len(tokenizer.encode_control(text)) == 1
        blank = raw.token_to_id("\n\n\n")  # white space that was added is ordinary text, under its own id
        assert ids_of(tokenizer, "a\n\n\nb") == [*ids_of(tokenizer, "a"), blank, *ids_of(tokenizer, "b")]

    def test_merges_that_spell_a_control_token_are_not_followed(self) -> None:
        fields = json.loads(tiny_tokenizer(300).to_str())
        vocab, merges = fields["model"]["vocab"], fields["model"]["merges"]
        for pair in (["<", "/"], ["</", "s"], ["</s", ">"]):
            vocab["".join(pair)] = len(vocab)
            merges.insert(0 if pair[0] == "<" else len(merges), pair)
        control = {"id": vocab["</s>"], "content": "</s>", "special": True}
        flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
        fields["added_tokens"].append({**control, **flags})
        fields["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = False
        tokenizer = Tokenizer(TokenizerSource(json=json.dumps(fields)))
        assert ids_of(tokenizer, "a</s>") == [vocab["a"], vocab["</s"], vocab[">"]]

    def test_whole_words_of_the_vocabulary_do_not_slip_through(self) -> None:
        fields = json.loads(tiny_tokenizer(300).to_str())
        fields["model"]["ignore_merges"] = True
        fields["pre_tokenizer"]["pretokenizers"][1]["use_regex"] = False
        tokenizer = Tokenizer(TokenizerSource(json=json.dumps(fields)))
        assert not tokenizer.control_ids & set(ids_of(tokenizer, "<|im_end|>"))


class TestBeginningOfText:
    def with_bos(self) -> tokenizers.Tokenizer:
        raw = tiny_tokenizer(400)
        raw.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A <|im_end|>", special_tokens=[("<|endoftext|>", 0), ("<|im_end|>", 2)]
        )
        return raw

    def test_the_post_processor_is_asked(self) -> None:
        tokenizer = Tokenizer(source_of(self.with_bos()))
        assert tokenizer.bos_ids == (0,)
        assert 0 not in ids_of(tokenizer, "text")
        assert 0 not in tokenizer.encode_control("text")

    def test_byte_level_post_processors_add_nothing(self) -> None:
        raw = tiny_tokenizer(400)
        raw.post_processor = processors.ByteLevel(trim_offsets=False)
        assert Tokenizer(source_of(raw)).bos_ids == ()

    def test_an_explicit_flag_wins(self) -> None:
        assert Tokenizer(source_of(self.with_bos(), add_bos=False)).bos_ids == ()
        with_flag = source_of(tiny_tokenizer(400), add_bos=True, bos_token="<|im_start|>")
        assert Tokenizer(with_flag).bos_ids == (1,)
        assert Tokenizer(source_of(tiny_tokenizer(400))).bos_ids == ()

    def test_a_flag_without_a_token_is_refused(self) -> None:
        with pytest.raises(ModelError, match="BOS token ''"):
            Tokenizer(source_of(tiny_tokenizer(400), add_bos=True))


class TestLongestToken:
    def test_bytes_are_counted_not_characters_that_stand_for_them(self, small: Tokenizer) -> None:
        vocab = tiny_tokenizer(512).get_vocab()
        assert small.max_token_bytes == max(len(t) for t in vocab if t not in CONTROL_TOKENS)

    def test_added_tokens_are_counted_in_bytes(self) -> None:
        raw = tiny_tokenizer(400)
        raw.add_tokens(["日" * 40])
        tokenizer = Tokenizer(source_of(raw))
        assert tokenizer.max_token_bytes == 120
        assert tokenizer.fewest_tokens("日" * 41) == 2

    def test_added_tokens_that_swallow_space_leave_no_bound(self) -> None:
        raw = tiny_tokenizer(400)
        raw.add_tokens([tokenizers.AddedToken("word", lstrip=True)])
        assert Tokenizer(source_of(raw)).max_token_bytes == 2**31 - 1

    def test_bytes_without_a_token_are_not_counted(self) -> None:
        fields = json.loads(tiny_tokenizer(300).to_str())
        del fields["model"]["vocab"]["\u0104"]  # stands for the byte 4
        tokenizer = Tokenizer(TokenizerSource(json=json.dumps(fields)))
        assert tokenizer.unknown_bytes == b"\x04"
        assert ids_of(tokenizer, "a\x04b\x04") == ids_of(tokenizer, "ab")
        assert tokenizer.fewest_tokens("\x04" * 1000) == 0
        assert tokenizer.fewest_tokens("\x04" * 1000 + "a") == 1

    def test_a_normalizer_that_composes_is_counted(self) -> None:
        raw = tiny_tokenizer(400)
        plain = Tokenizer(source_of(raw)).max_token_bytes
        raw.normalizer = normalizers.NFC()
        assert Tokenizer(source_of(raw)).max_token_bytes == 3 * plain
        raw.normalizer = normalizers.StripAccents()
        assert Tokenizer(source_of(raw)).max_token_bytes == 2**31 - 1

    def test_no_code_point_shrinks_more_than_the_bound(self) -> None:
        import unicodedata

        shrinkage = 0.0
        for point in (*range(0xD800), *range(0xE000, 0x110000)):
            for form in ("NFC", "NFD"):
                text = unicodedata.normalize("NFD", chr(point)) if form == "NFC" else chr(point)
                kept = unicodedata.normalize("NFC", chr(point))
                shrinkage = max(shrinkage, len(text.encode()) / len(kept.encode()))
        assert shrinkage <= 3


class TestFromGGUF:
    def read(self, folder: Path, path: Path, **arguments: Any) -> Tokenizer:
        file = read_gguf_header(write_gguf(folder, path, **arguments))
        return Tokenizer(tokenizer_from_gguf(file.metadata, str(path)), str(path))

    def test_smollm_is_the_folder_s_own_tokenizer(
        self, small: Tokenizer, tiny: Callable[..., Path], tmp_path: Path
    ) -> None:
        found = self.read(tiny("llama"), tmp_path / "m.gguf", pre="smollm")
        assert found.control_ids == small.control_ids
        assert found.bos_ids == ()
        for text in [*TEXTS, "1984 and 27"]:
            assert ids_of(found, text) == ids_of(small, text)
        assert found.encode_control("<|im_end|>\n") == small.encode_control("<|im_end|>\n")

    @pytest.mark.parametrize(
        ("pre", "text", "pieces"),
        [
            (
                "gpt-2",
                "It's 12345, l'été!!\n\n  x",
                ["It", "'s", " 12345", ",", " l", "'", "été", "!!", "\n\n ", " x"],
            ),
            ("smollm", "in 1984 x", ["in", " ", "1", "9", "8", "4", " x"]),
            (
                "qwen2",
                "in 12345 IT'S\n\nx !?\r\n",
                ["in", " ", *"12345", " IT", "'S", "\n\n", "x", " !?\r\n"],
            ),
            (
                "llama-bpe",
                "in 12345 IT'S\n\nx !?\n",
                ["in", " ", "123", "45", " IT", "'S", "\n\n", "x", " !?\n"],
            ),
            ("llama-bpe", "1234567", ["123", "456", "7"]),
        ],
    )
    def test_pre_tokenizers_split_as_documented(
        self, pre: str, text: str, pieces: list[str], tiny: Callable[..., Path], tmp_path: Path
    ) -> None:
        file = read_gguf_header(write_gguf(tiny("llama"), tmp_path / "m.gguf", pre=pre))
        raw = tokenizers.Tokenizer.from_str(tokenizer_from_gguf(file.metadata, "x").json)
        assert raw.pre_tokenizer is not None
        spans = [span for _, span in raw.pre_tokenizer.pre_tokenize_str(text)]
        assert [text[start:stop] for start, stop in spans] == pieces

    def test_qwen2_is_as_transformers_builds_it(self, tiny: Callable[..., Path], tmp_path: Path) -> None:
        import transformers

        found = self.read(tiny("qwen2"), tmp_path / "m.gguf", pre="qwen2")
        fields = json.loads((tiny("qwen2") / "tokenizer.json").read_text())
        merges = [tuple(merge) for merge in fields["model"]["merges"]]
        oracle = transformers.Qwen2Tokenizer(vocab=fields["model"]["vocab"], merges=merges)
        for text in [*TEXTS, "1984 IT'S", "e\u0301"]:
            assert ids_of(found, text) == oracle.encode(text, add_special_tokens=False), text

    def test_llama3_begins_with_bos_unless_the_file_says_otherwise(
        self, tiny: Callable[..., Path], tmp_path: Path
    ) -> None:
        assert self.read(tiny("llama"), tmp_path / "a.gguf", pre="llama-bpe").bos_ids == (0,)
        keys: dict[str, Any] = {"tokenizer.ggml.add_bos_token": False}
        assert self.read(tiny("llama"), tmp_path / "b.gguf", pre="llama-bpe", keys=keys).bos_ids == ()
        keys = {"tokenizer.ggml.add_bos_token": True}
        assert self.read(tiny("llama"), tmp_path / "c.gguf", pre="gpt-2", keys=keys).bos_ids == (0,)

    @pytest.mark.parametrize(
        ("pre", "named"),
        [(None, "no pre-tokenizer is named"), ("default", "'default'"), ("falcon", "'falcon'")],
    )
    def test_missing_and_unknown_tags_are_refused(
        self, pre: str | None, named: str, tiny: Callable[..., Path], tmp_path: Path
    ) -> None:
        with pytest.raises(ModelError, match=named) as caught:
            self.read(tiny("llama"), tmp_path / "m.gguf", pre=pre)
        assert "smollm" in str(caught.value)

    @pytest.mark.parametrize(
        ("key", "value", "named"),
        [
            ("tokenizer.ggml.model", "bert", "unknown tokenizer model 'bert'"),
            ("tokenizer.ggml.tokens", None, "vocabulary .* is missing"),
            ("tokenizer.ggml.tokens", ("a", "b", "a"), "'a' occurs twice"),
            ("tokenizer.ggml.token_type", numbers([1, 1]), "token_type has 2 entries"),
            ("tokenizer.ggml.merges", None, "merges .* are missing"),
            ("tokenizer.ggml.merges", ("a b c",), "merge 0 is 'a b c'"),
            ("tokenizer.ggml.eos_token_id", 10**6, "the eos token is 1000000"),
            ("tokenizer.ggml.eos_token_id", "x", "the eos token is 'x'"),
            ("tokenizer.ggml.tokens", "abc", "tokens is no array of texts"),
            ("tokenizer.ggml.tokens", (1, 2), "tokens is no array of texts"),
            ("tokenizer.ggml.token_type", ("1",), "token_type is no array of such numbers"),
            ("tokenizer.ggml.merges", 7, "merges is no array of texts"),
            ("tokenizer.ggml.pre", ("smollm",), "unknown pre-tokenizer"),
            ("tokenizer.ggml.add_bos_token", "yes", "add_bos_token is 'yes'"),
        ],
    )
    def test_contradictions_are_refused(
        self, key: str, value: Any, named: str, tiny: Callable[..., Path], tmp_path: Path
    ) -> None:
        metadata = read_gguf_header(write_gguf(tiny("llama"), tmp_path / "m.gguf")).metadata
        metadata[key] = value
        if key == "tokenizer.ggml.tokens" and value:
            del metadata["tokenizer.ggml.token_type"]
        with pytest.raises(ModelError, match=named):
            Tokenizer(tokenizer_from_gguf({k: v for k, v in metadata.items() if v is not None}, "x"))


class TestSentencePiece:
    """`tokenizer.ggml.model` = "llama": merges follow the pieces' scores."""

    PIECES = (
        "▁the",
        "▁t",
        "he",
        "▁",
        "t",
        "h",
        "e",
        "▁c",
        "at",
        "▁cat",
        "c",
        "a",
        "s",
        "▁s",
        "sat",
        "▁sat",
        "ta",
    )

    def metadata(self, **more: Any) -> dict[str, Any]:
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *self.PIECES]
        types = [2, 3, 3, *[6] * 256, *[1] * len(self.PIECES)]
        return {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tuple(tokens),
            "tokenizer.ggml.token_type": numbers(types),
            "tokenizer.ggml.scores": numbers([0.0] * 259 + [-float(i) for i in range(len(self.PIECES))]),
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            **more,
        }

    def by_definition(self, text: str) -> list[int]:
        """Merge the adjacent pair whose joint piece scores best, leftmost first, until none is left."""
        ids = {piece: 259 + index for index, piece in enumerate(self.PIECES)}
        parts = list(text.replace(" ", "▁"))
        while True:
            pairs = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
            joint = [(ids[pair], i) for i, pair in enumerate(pairs) if pair in ids]
            if not joint:
                break
            _, at = min(joint)
            parts[at : at + 2] = ["".join(parts[at : at + 2])]
        found: list[int] = []
        for part in parts:
            found += [ids[part]] if part in ids else [3 + byte for byte in part.encode()]
        return found

    @given(st.text(alphabet="the catséx\n<>/", max_size=20))
    @settings(max_examples=300, deadline=None)
    def test_ids_follow_the_definition(self, text: str) -> None:
        tokenizer = self.tokenizer()
        assert ids_of(tokenizer, text) == self.by_definition(text)

    def tokenizer(self, **more: Any) -> Tokenizer:
        return Tokenizer(tokenizer_from_gguf(self.metadata(**more), "x"))

    def test_bos_control_text_and_round_trip(self) -> None:
        tokenizer = self.tokenizer()
        assert tokenizer.bos_ids == (1,)
        ids = ids_of(tokenizer, "the cat</s> sat <0x0A>")
        assert not {0, 1, 2} & set(ids)
        assert tokenizer.decode(ids) == "the cat</s> sat <0x0A>"
        assert tokenizer.encode_control("</s>") == [2]
        assert tokenizer.max_token_bytes == 4

    def test_an_answer_is_spelled_as_it_stands_behind_a_cue(self) -> None:
        tokenizer = self.tokenizer()
        assert ids_of(tokenizer, " cat") == [268]
        assert ids_of(tokenizer, "cat") == [269, 267]

    @pytest.mark.parametrize("metaspace", [True, False])
    def test_a_space_that_a_folder_s_tokenizer_puts_in_front_is_left_out(self, metaspace: bool) -> None:
        source = tokenizer_from_gguf(self.metadata(), "x")
        fields = json.loads(source.json)
        space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        if metaspace:
            fields["normalizer"] = None
            fields["pre_tokenizer"] = {
                "type": "Metaspace",
                "replacement": "▁",
                "prepend_scheme": "first",
                "split": False,
            }
        else:
            steps = [{"type": "Prepend", "prepend": "▁"}, space]
            fields["normalizer"] = {"type": "Sequence", "normalizers": steps}
        fields["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        tokenizer = Tokenizer(TokenizerSource(json=json.dumps(fields)))
        for text in ("the cat", " the", "sat  sat", ""):
            assert ids_of(tokenizer, text) == self.by_definition(text)
            assert tokenizer.encode_control(text) == self.by_definition(text)
            assert tokenizer.decode(ids_of(tokenizer, text)) == text

    def test_scores_are_needed(self) -> None:
        with pytest.raises(ModelError, match=r"276 tokens, but tokenizer\.ggml\.scores has 1 entries"):
            self.tokenizer(**{"tokenizer.ggml.scores": numbers([0.0])})
        with pytest.raises(ModelError, match=r"scores .* are missing"):
            self.tokenizer(**{"tokenizer.ggml.scores": ()})


GOLDEN = {
    "Hello world": [19556, 905],
    "The year 1984": [504, 713, 216, 33, 41, 40, 36],
    "DOCUMENT:\nI loved it.\n\n": [52, 7524, 8292, 6213, 42, 198, 57, 5732, 357, 30, 1116],
    "Sentiment:": [35658, 2572, 42],
    " positive": [2731],
    "<|im_end|>": [44, 108, 306, 79, 486, 108, 46],
}  # fmt: skip


class TestDefaultModel:
    def test_golden_ids(self, default_model_file: Path) -> None:
        file = read_gguf_header(default_model_file)
        tokenizer = Tokenizer(tokenizer_from_gguf(file.metadata, "x"))
        assert tokenizer.vocab_size == 49152
        assert tokenizer.bos_ids == ()
        assert tokenizer.control_ids == frozenset(range(17))
        assert tokenizer.max_token_bytes == 81
        assert bytes(b for b in tokenizer.unknown_bytes if b < 128) == b"\x04\x06\x13\x14\x16\x1d"
        for text, ids in GOLDEN.items():
            assert ids_of(tokenizer, text) == ids

    def test_text_without_digits_is_as_in_transformers(self, default_model_file: Path) -> None:
        import transformers

        file = read_gguf_header(default_model_file)
        tokenizer = Tokenizer(tokenizer_from_gguf(file.metadata, "x"))
        oracle = transformers.AutoTokenizer.from_pretrained(
            default_model_file.parent, gguf_file=default_model_file.name
        )
        for text in TEXTS:
            if not any(character.isdigit() for character in text):
                assert ids_of(tokenizer, text) == oracle.encode(text, add_special_tokens=False)
