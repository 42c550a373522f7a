"""Chat templates cut at the user's text, with `transformers` as the oracle of the rendering."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quail.errors import ModelError
from quail.models.chat import ChatPieces, chat_pieces
from quail.models.loader import LoadedModel, load_model
from tests.models.tiny import CHAT_TEMPLATE

QWEN3_ENDING = (
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"
)
TEMPLATES = [
    CHAT_TEMPLATE,
    "{%- for m in messages %}\n    {{- m['role'] + ': ' + m['content'] | trim + '\\n' }}\n{%- endfor %}",
    "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}{{ eos_token }}",
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}{% endfor %}" + QWEN3_ENDING,
    "{% if tools is not none %}{{ tools | tojson }}{% endif %}{{ messages[0].content }}!",
    "{% for m in messages %}{% if loop.first %}{{ m.content }}{% continue %}{% endif %}x{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
]


def pieces_of(template: str) -> ChatPieces:
    return chat_pieces(template, bos_token="<s>", eos_token="</s>", where="x")


@pytest.mark.parametrize("template", TEMPLATES)
def test_pieces_around_a_text_are_what_transformers_renders(template: str, tiny: Callable[..., Path]) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        tiny("llama"), chat_template=template, bos_token="<s>", eos_token="</s>"
    )
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "some text"}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=False,
    )
    pieces = pieces_of(template)
    assert pieces.opener + "some text" + pieces.closer == expected


def test_dates_are_fixed() -> None:
    assert pieces_of("{{ strftime_now('%Y') }}{{ messages[0].content }}").opener == "26 Jul 2024"


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{{ messages[0].content", "chat template fails"),
        ("{{ raise_exception('only in pairs') }}", "only in pairs"),
        ("{{ undefined.field }}", "chat template fails"),
        ("{{ 1 / 0 }}", "chat template fails"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "chat template fails"),
        ("{{ messages.append(1) }}{{ messages[0].content }}", "chat template fails"),
        ("nothing of the user", "0 times"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "2 times"),
        ("{% for i in range(1000000000) %}x{% endfor %}", "chat template fails"),
    ],
)
def test_templates_that_cannot_serve_are_named(template: str, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        pieces_of(template)


def with_settings(folder: Path, to: Path, **fields: object) -> Path:
    path = Path(shutil.copytree(folder, to)) / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path.parent


def load(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype=torch.float32, cache_dir=folder / "cache")


def test_a_model_comes_with_its_pieces(tiny: Callable[..., Path], tmp_path: Path) -> None:
    model = load(with_settings(tiny("llama"), tmp_path / "m"))
    assert model.chat == ChatPieces(
        "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    )
    assert (model.layout, model.chat_problem) == ("chat", "")


def test_a_template_in_a_file_of_its_own_comes_first(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = with_settings(tiny("llama"), tmp_path / "m")
    (folder / "chat_template.jinja").write_text("Q: {{ messages[0].content }}\nA:")
    assert load(folder).chat == ChatPieces("Q: ", "\nA:")


def test_the_default_of_several_templates_is_used(tiny: Callable[..., Path], tmp_path: Path) -> None:
    several = [
        {"name": "tool_use", "template": "T {{ messages[0].content }}"},
        {"name": "default", "template": "D {{ messages[0].content }}"},
    ]
    assert load(with_settings(tiny("llama"), tmp_path / "m", chat_template=several)).chat == ChatPieces(
        "D ", ""
    )


@pytest.mark.parametrize(
    ("template", "problem"), [(None, "has no chat template"), ("{{ raise_exception('no') }}", "fails: no")]
)
def test_a_model_without_a_usable_template_loads(
    template: str | None, problem: str, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    model = load(with_settings(tiny("llama"), tmp_path / "m", chat_template=template))
    assert model.chat is None
    assert model.layout == "completion"
    assert problem in model.chat_problem


def test_bos_stands_once_whoever_writes_it(tiny: Callable[..., Path], tmp_path: Path) -> None:
    import transformers

    template = "{{ bos_token }}" + CHAT_TEMPLATE
    fields = {"chat_template": template, "bos_token": "<|endoftext|>"}
    for flag in (True, False, None):
        folder = with_settings(tiny("llama"), tmp_path / f"m{flag}", add_bos_token=flag, **fields)
        model = load(folder)
        assert model.chat is not None
        found = [
            *model.tokenizer.bos_ids,
            *model.tokenizer.encode_control(model.chat.opener),
            *model.tokenizer.encode_plain(["plain text"])[0].tolist(),
            *model.tokenizer.encode_control(model.chat.closer),
        ]
        expected = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
            [{"role": "user", "content": "plain text"}], add_generation_prompt=True, return_dict=False
        )
        assert found == expected
        assert found.count(0) == 1
