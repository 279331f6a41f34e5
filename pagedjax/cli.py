"""The command ``pagedjax``. Only argparse is imported before a command runs, so that ``--help`` is instant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_SYSTEM = (  # the built-in prompts share it, so that its KV is computed once
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. Answer in plain words, as short as the "
    "question allows, and say so if you do not know. When you are asked for a list, write one item a line. When you "
    "are asked for a poem, keep to the form that was asked for."
)
DEFAULT_PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Explain in two sentences why the sky is blue.",
    "Name three uses of a linked list.",
    "Write a haiku about the sea.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code: 0, or 2 after an error in what the user gave."""
    options = _parser().parse_args(arguments)
    if options.command == "generate":
        from pagedjax.commands.generate import run
    else:
        from pagedjax.commands.bench import run
    try:
        return run(options)
    except (ValueError, OSError) as error:  # LoadError, RequestError, CacheFolderError and bad options are ValueErrors
        message = " ".join(str(error).split())
        print(f"pagedjax: error: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("pagedjax: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagedjax", description="Text generation in JAX through a paged KV cache.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands.add_parser("generate", help="complete or answer prompts and show what paging saved"))
    _add_bench(commands.add_parser("bench", help="measure; one JSON record a line with --json"))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.description = "Answers prompts, several at a time, and shows what the paged cache saved."
    add = parser.add_argument
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    prompts.add_argument(
        "--prompts-file", metavar="FILE", help='JSON lines with "prompt", or plain text, a prompt a line'
    )
    form = prompts.add_mutually_exclusive_group()
    form.add_argument("--chat", dest="chat", action="store_true", default=None, help="use the model's chat template")
    form.add_argument("--raw", dest="chat", action="store_false", help="complete the prompt as it is")
    prompts.add_argument("--system", metavar="TEXT", help="system prompt for --chat; the template's own by default")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, default=64, help="tokens of a completion at most (default 64)")
    sampling.add_argument("-n", type=int, default=1, help="completions of each prompt (default 1)")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    sampling.add_argument("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability")
    sampling.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 keeps all")
    sampling.add_argument("--seed", type=int, default=0, help="0 to 2**32 - 1 (default 0)")
    sampling.add_argument("--ignore-eos", action="store_true", help="do not stop at the model's end tokens")
    add("--model", default=DEFAULT_MODEL, help=f"{DEFAULT_MODEL}, a Hugging Face folder or a GGUF file")
    add("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights and cache (default float32)")
    add("--block-size", type=int, help="tokens in a block (default 32 on CPU, 64 elsewhere)")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--num-blocks", type=int, help="blocks of the pool, the null block included")
    size.add_argument("--kv-memory", metavar="SIZE", help="memory of the pool, such as 512MiB (default 1GiB at most)")
    add("--max-rows", type=int, default=32, help="sequences that run at the same time (default 32)")
    add("--prefill-chunk", type=int, default=512, help="prefill tokens in a step (default 512)")
    add("--json", action="store_true", help="print one JSON object instead of text")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, text in (
        ("engine", "steps of the demo model: prefill and decode, and how far from the machine's limits"),
        ("cache", "the host side: block pool, hashing, prefix index"),
        ("reuse", "how many reusable tokens prefix caching reuses"),
    ):
        bench = benches.add_parser(name, help=text, description=text)
        bench.add_argument("--json", action="store_true", help="print records, a JSON object a line")
        bench.add_argument("--quick", action="store_true", help="fewer cases and repeats")
        if name == "engine":
            bench.add_argument("--model", default=DEFAULT_MODEL)
            bench.add_argument("--dtype", action="append", choices=("float32", "bfloat16"), help="default: both")
            bench.add_argument("--block-size", type=int)
            bench.add_argument("--workload", metavar="FILE", help="JSON with requests of prompt_ids and max_tokens")


if __name__ == "__main__":
    sys.exit(main())
