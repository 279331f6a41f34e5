"""``pagedjax generate``: prompts in, streamed text and a table of what paging saved out."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pagedjax.cli import DEFAULT_PROMPTS, DEFAULT_SYSTEM

if TYPE_CHECKING:
    from rich.console import Console, Group

    from pagedjax.engine import LLM, EngineStats, RequestOutput, SamplingParams


def run(options: argparse.Namespace) -> int:
    """Generates as the options say."""
    prompts = read_prompts(options.prompt, options.prompts_file)

    from rich.console import Console

    from pagedjax.engine import LLM, EngineConfig, SamplingParams

    params = SamplingParams(
        max_tokens=options.max_tokens,
        n=options.n,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
    )
    config = EngineConfig(
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        kv_memory=options.kv_memory,
        max_rows=options.max_rows,
        max_prefill_tokens=options.prefill_chunk,
    )
    console = Console(stderr=True)
    with console.status(f"loading {options.model}"):
        llm = LLM(options.model, config=config, dtype=options.dtype)
    chat = (llm.tokenizer.chat_template is not None) if options.chat is None else options.chat
    built_in = not options.prompt and options.prompts_file is None
    system = DEFAULT_SYSTEM if options.system is None and built_in else options.system
    inputs = [chat_prompt(llm, prompt, system) if chat else prompt for prompt in prompts]
    outputs = generate(llm, prompts, inputs, params, console, quiet=options.json)
    if options.json:
        print(json.dumps(as_json(prompts, outputs, llm.stats()), ensure_ascii=False))
    else:
        show(prompts, outputs)
        Console().print(stats_table(llm.stats()))
    return 0


def read_prompts(given: list[str] | None, file: str | None) -> list[str]:
    """Prompts of the command line and of the file, in this order; the built-in ones where there are none.

    Raises:
        ValueError: the file cannot be read, has no prompt, or a line of it is malformed.
    """
    prompts = list(given or [])
    if file is not None:
        prompts += _prompts_of(Path(file))
    elif not prompts:
        prompts = list(DEFAULT_PROMPTS)
    return prompts


def _prompts_of(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text; save the prompts as UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if not lines:
        raise ValueError(f"{path} has no prompts; write one a line")
    if not lines[0].lstrip().startswith("{"):
        return lines
    prompts = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"prompt {number} of {path} is not JSON ({error.msg}); write an object a line") from None
        if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
            raise ValueError(f'prompt {number} of {path} has no text under "prompt"')
        prompts.append(value["prompt"])
    return prompts


def chat_prompt(llm: LLM, prompt: str, system: str | None) -> list[int]:
    """Token ids of a conversation with one question."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.chat_prompt([*messages, {"role": "user", "content": prompt}])


def generate(
    llm: LLM, prompts: list[str], inputs: list[Any], params: SamplingParams, console: Console, *, quiet: bool
) -> list[RequestOutput]:
    """Runs the engine; shows text as it comes where there is a terminal, progress otherwise."""
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    most = sum(params.n * (params.max_tokens or 0) for _ in inputs)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console)
    task = progress.add_task("compiling", total=most or None)
    outputs: list[RequestOutput] = []
    with Live(progress, console=console, transient=True, refresh_per_second=8) as live:
        for outputs in llm.stream(inputs, params):
            done = sum(len(c.token_ids) for o in outputs for c in o.completions)
            progress.update(task, completed=done, description="tokens" if done else "compiling")
            if not quiet and console.is_terminal:
                live.update(_growing(prompts, outputs, progress, console))
    return outputs


def _growing(prompts: list[str], outputs: list[RequestOutput], progress: Any, console: Console) -> Group:
    """The texts so far, cut so that all of them fit on the screen."""
    from rich.console import Group
    from rich.text import Text

    completions = [(prompt, c) for prompt, o in zip(prompts, outputs, strict=True) for c in o.completions]
    room = max(1, (console.height - 3) // max(1, len(completions)) - 1)
    lines: list[Any] = []
    for prompt, completion in completions[: max(1, console.height // 2)]:
        lines.append(Text(f"> {prompt}", style="bold", overflow="ellipsis", no_wrap=True))
        lines.append(Text(completion.text[-room * console.width :]))
    return Group(*lines, progress)


def show(prompts: list[str], outputs: list[RequestOutput]) -> None:
    """Prints all completions."""
    for prompt, output in zip(prompts, outputs, strict=True):
        print(f"> {prompt}")
        for completion in output.completions:
            print(f"{f'[{completion.index}] ' if len(output.completions) > 1 else ''}{completion.text.strip()}")
        print(flush=True)


def as_json(prompts: list[str], outputs: list[RequestOutput], stats: EngineStats) -> dict[str, Any]:
    """The object that ``--json`` prints."""
    return {
        "outputs": [
            {
                "prompt": prompt,
                "prompt_token_ids": output.prompt_token_ids,
                "num_cached_tokens": output.num_cached_tokens,
                "completions": [
                    {"token_ids": c.token_ids, "text": c.text, "finish_reason": c.finish_reason}
                    for c in output.completions
                ],
            }
            for prompt, output in zip(prompts, outputs, strict=True)
        ],
        "stats": stats.to_dict(),
    }


def stats_table(stats: EngineStats) -> Any:
    """The table at the end."""
    from rich.table import Table

    table = Table(title="pagedjax", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    hits = stats.num_cached_tokens
    share = hits / stats.num_prompt_tokens if stats.num_prompt_tokens else 0.0
    saved = 1 - stats.peak_held_bytes / stats.contiguous_bytes if stats.contiguous_bytes else 0.0
    for name, value, note in (
        ("prompt", f"{stats.prefill_tokens_per_s:,.0f} tokens/s", f"{stats.num_computed_prefill_tokens:,} computed"),
        ("decode", f"{stats.decode_tokens_per_s:,.0f} tokens/s", f"{stats.num_generated_tokens:,} generated"),
        ("prefix hits", f"{hits:,} tokens", f"{share:.0%} of {stats.num_prompt_tokens:,} prompt tokens"),
        ("blocks shared", f"{stats.peak_shared_blocks:,}", f"at most at once, of {stats.block_size} tokens"),
        ("copy-on-write copies", f"{stats.num_copies:,}", "blocks"),
        ("KV held", _mib(stats.peak_held_bytes), f"at most at once, {stats.peak_rows} sequences"),
        ("KV contiguous", _mib(stats.contiguous_bytes), f"reserved for as many at full length; saved {saved:.1%}"),
        ("compilations", f"{stats.num_compilations}", f"{stats.compile_s:.1f} s, loaded ones included"),
    ):
        table.add_row(name, value, note)
    return table


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
