"""Tokenizers, from GGUF metadata or from a Hugging Face folder, run by the ``tokenizers`` package.

`Tokenizer` is text to ids and back, a stream of text for a stream of ids, and the model's chat template. Special tokens
are recognised in any text that is encoded, as in Hugging Face transformers: chat text depends on it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pagedjax.models.chat import ChatTemplate, ChatTemplateError
from pagedjax.models.config import read_json
from pagedjax.models.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, bytes_of_token
from pagedjax.models.errors import LoadError

__all__ = ["Tokenizer", "tokenizer_from_gguf", "tokenizer_from_hf"]

_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_PRE_TOKENIZERS = ("gpt-2", "smollm", *_LLAMA3_NAMES)


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        eos_ids: ids that end an answer, ascending.
        vocab_size: the largest id that a text can give, plus 1.
        source: the file that it comes from, for messages.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        source: str,
        eos_ids: Sequence[int] = (),
        bos_ids: Sequence[int] = (),
        chat_template: ChatTemplate | None = None,
    ):
        """Wraps a ``tokenizers.Tokenizer``; `bos_ids` are put before every text that is no chat."""
        from tokenizers import decoders

        self.source = source
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.chat_template = chat_template
        self._tokenizer = tokenizer
        self._bos_ids = list(bos_ids)
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._token_bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; special tokens that stand in it are recognised.

        Args:
            text: any text.
            add_special_tokens: also put in what the model expects around a text, such as its beginning-of-text token.
        """
        ids = list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        return self._bos_ids + ids if add_special_tokens else ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; ids that the vocabulary does not have are left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> list[int]:
        """Ids of a conversation.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            add_generation_prompt: end with the beginning of the assistant's answer.
            extra: further variables for the template.

        Raises:
            ChatTemplateError: the model has no chat template, or it refuses these messages.
        """
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **extra)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        """As `apply_chat_template`, but the text before it is encoded."""
        if self.chat_template is None:
            raise ChatTemplateError(f"{self.source}: the model has no chat template; give it raw prompts (--raw)")
        return self.chat_template.render(messages, add_generation_prompt=add_generation_prompt, **extra)

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A new stream: ids in, one at a time, text out; in all it gives what `decode` gives."""
        if not self._byte_level:
            return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=skip_special_tokens))
        if not skip_special_tokens:
            return ByteDetokenizer(self._bytes)
        return ByteDetokenizer(lambda token_id: b"" if token_id in self._special else self._bytes(token_id))

    def _bytes(self, token_id: int) -> bytes:
        found = self._token_bytes.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id)
            found = self._token_bytes[token_id] = b"" if token is None else bytes_of_token(token)
        return found


def tokenizer_from_gguf(metadata: Mapping[str, Any], *, source: str = "GGUF") -> Tokenizer:
    """Builds the tokenizer that the metadata of a GGUF file describes.

    Args:
        metadata: as `GGUFFile.metadata` has it.
        source: what messages call the file.

    Raises:
        LoadError: it is no byte-level BPE, its pre-tokenizer is not known, or parts are missing or contradictory.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise LoadError(
            f"{source}: tokenizer {kind!r} is not supported; supported: 'gpt2'; use the Hugging Face folder instead"
        )
    if pre not in _PRE_TOKENIZERS:
        raise LoadError(f"{source}: pre-tokenizer {pre!r} is not known; known: {', '.join(_PRE_TOKENIZERS)}")
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not isinstance(tokens, list) or not isinstance(merges, list):
        raise LoadError(f"{source}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing; fetch the file again")
    ids = {
        name: _special_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens), source)
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    types = metadata.get("tokenizer.ggml.token_type", [])
    special = {i for i, kind in enumerate(types) if kind == _CONTROL}
    special |= {i for i in (ids["bos"], ids["eos"]) if i is not None}
    added = dict.fromkeys(special, True) | {i: False for i, kind in enumerate(types) if kind == _USER_DEFINED}
    tokenizer = _byte_level_bpe(tokens, merges, pre, added, source)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in _LLAMA3_NAMES)
    template = None
    if isinstance(text := metadata.get("tokenizer.chat_template"), str):
        names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        variables = {names[name]: tokens[i] for name, i in ids.items() if i is not None and name in names}
        template = ChatTemplate(text, source=source, variables=variables)
    return Tokenizer(
        tokenizer,
        source=source,
        eos_ids=[i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None],
        bos_ids=[ids["bos"]] if adds_bos and ids["bos"] is not None else [],
        chat_template=template,
    )


def _special_id(metadata: Mapping[str, Any], key: str, num_tokens: int, source: str) -> int | None:
    value = metadata.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < num_tokens):
        raise LoadError(
            f"{source}: {key} is {value!r} but the tokenizer has {num_tokens:,} tokens; fetch the file again"
        )
    return value


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str, added: Mapping[int, bool], source: str) -> Any:
    """A ``tokenizers.Tokenizer``; `added`: the ids that are matched whole in any text, and whether each is special."""
    from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as FastTokenizer

    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise LoadError(
            f"{source}: {len(tokens) - len(vocab)} tokens of tokenizer.ggml.tokens are doubled; fetch the file again"
        )
    try:
        pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
        bpe = models.BPE(vocab, pairs, fuse_unk=False, byte_fallback=False, ignore_merges=pre in _LLAMA3_NAMES)
    except Exception as error:  # tokenizers raises nothing more precise
        raise LoadError(
            f"{source}: tokenizer.ggml.merges do not fit the tokens ({error}); fetch the file again"
        ) from error
    tokenizer = FastTokenizer(bpe)
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in _LLAMA3_NAMES)]
    if pre == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif pre in _LLAMA3_NAMES:
        steps.insert(0, pre_tokenizers.Split(Regex(_LLAMA3), behavior="isolated"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    for is_special in (True, False):
        found = [
            AddedToken(tokens[i], special=is_special, normalized=False) for i in sorted(added) if added[i] is is_special
        ]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(found)
    return tokenizer


def tokenizer_from_hf(folder: Path | str) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face folder.

    From ``tokenizer.json``; ids that end an answer from ``generation_config.json`` (else ``config.json``) and
    ``tokenizer_config.json``; the chat template from ``chat_template.jinja`` or ``tokenizer_config.json``.

    Raises:
        LoadError: no ``tokenizer.json``, or a file that is damaged.
    """
    from tokenizers import Tokenizer as FastTokenizer

    folder = Path(folder)
    path = folder / "tokenizer.json"
    try:
        tokenizer = FastTokenizer.from_str(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadError(f"{path}: no such file; a Hugging Face folder needs it") from None
    except Exception as error:  # tokenizers raises nothing more precise
        raise LoadError(
            f"{path}: no tokenizer that the tokenizers package can read ({error}); fetch it again"
        ) from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    settings = _optional_json(folder / "tokenizer_config.json")
    named = {key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token", "unk_token", "pad_token")}
    eos_ids = _eos_ids(folder)
    if named["eos_token"] is not None and (eos := tokenizer.token_to_id(named["eos_token"])) is not None:
        eos_ids.append(eos)
    template = _hf_template(folder, settings, {key: text for key, text in named.items() if text is not None})
    return Tokenizer(tokenizer, source=str(path), eos_ids=eos_ids, chat_template=template)


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """A token in ``tokenizer_config.json`` is a text, or an object with the text as its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _eos_ids(folder: Path) -> list[int]:
    for path in (folder / "generation_config.json", folder / "config.json"):
        value = _optional_json(path).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
                raise LoadError(f"{path}: eos_token_id is {value!r} but must be a token id or a list of them")
            return list(ids)
    return []


def _hf_template(folder: Path, settings: Mapping[str, Any], variables: Mapping[str, str]) -> ChatTemplate | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), source=str(path), variables=variables)
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"{path}: cannot be read ({error}); fetch it again") from error
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, each with a name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is None:
        return None
    source = folder / "tokenizer_config.json"
    if not isinstance(template, str):
        raise LoadError(
            f"{source}: chat_template is a {type(template).__name__} but must be a text; fetch the file again"
        )
    return ChatTemplate(template, source=str(source), variables=variables)
