"""Ids of texts, texts of ids, streams of text, and chats."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import SPECIAL, TOKENS, Tiny, tokenizer_json, write_gguf, write_hf
from tokenizers import Tokenizer as FastTokenizer

from pagedjax.models import (
    ChatTemplate,
    ChatTemplateError,
    LoadError,
    find_demo_model,
    tokenizer_from_gguf,
    tokenizer_from_hf,
)
from pagedjax.models.gguf_file import GGUFFile
from pagedjax.models.tokenizer import Tokenizer

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "greedy.json").read_text())


def from_gguf(path):
    file = GGUFFile(path)
    file.close()
    return tokenizer_from_gguf(file.metadata, source=str(path))


@pytest.fixture(scope="module")
def demo():
    return from_gguf(find_demo_model())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return from_gguf(write_gguf(tmp_path_factory.mktemp("tiny") / "m.gguf", Tiny()))


@pytest.fixture(scope="module")
def sentencepiece():
    """What Llama 2 has: byte fallback, and a decoder that looks at a token's neighbours."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {token: 257 + i for i, token in enumerate(["▁", "a", "b", "é", "▁a", "▁b"])}
    data = tokenizer_json() | {
        "added_tokens": [],
        "pre_tokenizer": None,
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
    }
    data["model"] |= {"vocab": vocab, "merges": ["▁ a", "▁ b"], "byte_fallback": True, "unk_token": "<unk>"}
    return Tokenizer(FastTokenizer.from_str(json.dumps(data)), source="test")


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case["prompt"][:12].strip())
def test_ids_of_the_demo_model_are_those_of_transformers(demo, case):
    assert demo.encode(case["prompt"]) == case["prompt_ids"]
    assert demo.decode(case["prompt_ids"], skip_special_tokens=False) == case["prompt"]


def test_the_demo_models_chat_is_chatml_with_its_system_prompt(demo):
    text = demo.render_chat([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = demo.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids.count(1) == 3  # each <|im_start|> is one token
    assert ids.count(2) == 2
    assert demo.decode(ids, skip_special_tokens=False) == text
    assert (demo.eos_ids, demo.vocab_size) == ((2,), 49152)


def test_digits_are_split_one_by_one_and_merges_apply(tiny):
    assert [TOKENS[i] for i in tiny.encode("the the 12")] == ["t", "he", "Ġthe", "Ġ", "1", "2"]


def test_the_other_pre_tokenizers_split_numbers_as_they_should(tmp_path):
    for pre, expected in (("gpt-2", ["12", "3", "4"]), ("llama-bpe", ["12", "3", "4"])):
        tokenizer = from_gguf(write_gguf(tmp_path / "m.gguf", Tiny(), metadata={"tokenizer.ggml.pre": pre}))
        ids = tokenizer.encode("1234", add_special_tokens=False)
        assert [TOKENS[i] for i in ids] == expected
    # llama-bpe cuts numbers after three digits, so that 1 2 is not merged across the cut
    assert [TOKENS[i] for i in tokenizer.encode("99912", add_special_tokens=False)] == ["9", "9", "9", "12"]
    assert [TOKENS[i] for i in tokenizer.encode("9912", add_special_tokens=False)] == ["9", "9", "1", "2"]


def test_a_beginning_of_text_token_is_added_where_the_file_says_so_but_never_to_a_chat(tmp_path):
    tokenizer = from_gguf(write_gguf(tmp_path / "m.gguf", Tiny(), metadata={"tokenizer.ggml.add_bos_token": True}))
    assert tokenizer.encode("a")[0] == 1
    assert tokenizer.encode("a", add_special_tokens=False)[0] != 1
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}]).count(1) == 2


def test_a_gguf_and_a_hugging_face_folder_of_one_model_give_the_same_tokenizer(tmp_path, tiny):
    other = tokenizer_from_hf(write_hf(tmp_path / "hf", Tiny()))
    messages = [{"role": "user", "content": "the the 123 é"}, {"role": "assistant", "content": "<ok>"}]
    assert other.apply_chat_template(messages) == tiny.apply_chat_template(messages)
    assert (other.eos_ids, other.vocab_size) == (tiny.eos_ids, tiny.vocab_size) == ((2,), len(TOKENS))


def test_generation_config_says_what_ends_an_answer(tmp_path):
    folder = write_hf(tmp_path / "hf", Tiny(), config={"eos_token_id": 77})
    assert tokenizer_from_hf(folder).eos_ids == (2, 77)
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    assert tokenizer_from_hf(folder).eos_ids == (2, 5, 9)


@given(st.text())
def test_decoding_undoes_encoding(tiny, text):
    if not any(token in text for token in SPECIAL):
        assert tiny.decode(tiny.encode(text)) == text


@given(ids=st.lists(st.integers(0, len(TOKENS) + 20), max_size=60), skip=st.booleans())
def test_a_stream_of_any_ids_gives_what_decode_gives(tiny, ids, skip):
    stream = tiny.detokenizer(skip_special_tokens=skip)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) + stream.flush() == tiny.decode(ids, skip_special_tokens=skip)


@given(st.text(alphabet=st.sampled_from("ab é€😀ñ")))
def test_a_stream_never_ends_in_half_a_character(tiny, sentencepiece, text):
    for tokenizer in (tiny, sentencepiece):
        stream, shown = tokenizer.detokenizer(), ""
        ids = tokenizer.encode(text)
        for token_id in ids:
            shown += stream.push(token_id)
            assert text.startswith(shown)
        assert shown + stream.flush() == tokenizer.decode(ids) == text


def test_an_unfinished_character_is_shown_as_such_at_the_end_only(tiny, sentencepiece):
    for tokenizer in (tiny, sentencepiece):
        stream = tokenizer.detokenizer()
        ids = tokenizer.encode("a😀")[:-1]
        assert "".join(map(stream.push, ids)) == "a"
        assert set(stream.flush()) == {"\N{REPLACEMENT CHARACTER}"}


def test_a_window_stays_short_even_where_no_token_is_text(sentencepiece):
    stream = sentencepiece.detokenizer()
    for _ in range(1000):
        stream.push(0x80 + 1)  # a continuation byte without a beginning
        assert len(stream._window) <= 2 * stream._MAX_HELD


def test_a_template_has_the_globals_and_the_whitespace_rules_of_transformers():
    template = ChatTemplate(
        "{% if messages %}\n{{ messages[0].content | tojson }}{{ strftime_now('%Y') | length }}{{ bos_token }}\n"
        "  {% endif %}\n{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
        source="t",
        variables={"bos_token": "<s>"},
    )
    assert template.render([{"role": "user", "content": "<é>"}, {"role": "b", "content": ""}]) == '"<é>"4<s>\nb'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ ''.__class__.__mro__ }}", "fails on these messages"),
        ("{% set _ = messages.append(1) %}", "fails on these messages"),
        ("{% for %}", "chat template is damaged"),
    ],
)
def test_a_template_that_refuses_or_escapes_is_one_clear_error(text, message):
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate(text, source="t").render([{"role": "user", "content": "x"}])


def test_chat_without_a_template_says_so(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", Tiny(), metadata={"tokenizer.chat_template": None})
    with pytest.raises(ChatTemplateError, match="has no chat template; give it raw prompts"):
        from_gguf(path).apply_chat_template([{"role": "user", "content": "x"}])


def test_a_template_file_beats_the_one_in_the_settings_and_named_ones_are_told_apart(tmp_path):
    folder = write_hf(tmp_path / "hf", Tiny())
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert tokenizer_from_hf(folder).render_chat([]) == "D"
    (folder / "chat_template.jinja").write_text("J{{ eos_token }}")
    assert tokenizer_from_hf(folder).render_chat([]) == "J"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, "tokenizer 'llama' is not supported"),
        ({"tokenizer.ggml.pre": "qwen2"}, "pre-tokenizer 'qwen2' is not known; known: gpt-2, smollm"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["q zz"]}, "merges do not fit the tokens"),
        ({"tokenizer.ggml.merges": ["q"]}, "merges do not fit the tokens"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999 but the tokenizer has 263 tokens"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_a_load_error(tmp_path, metadata, message):
    with pytest.raises(LoadError, match=message):
        from_gguf(write_gguf(tmp_path / "m.gguf", Tiny(), metadata=metadata))
