"""Generate with a real model through the paged cache, three ways: complete, sample several, chat.

uv run python examples/quickstart.py            # --quick for fewer tokens; the same on CPU, GPU and TPU
"""

import argparse

import pagedjax as pj


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="or a Hugging Face folder, or a GGUF file")
    parser.add_argument("--quick", action="store_true", help="a few tokens only")
    options = parser.parse_args()
    count = 8 if options.quick else 48
    llm = pj.LLM(options.model, config=pj.EngineConfig(max_rows=4, max_len=512, max_prefill_tokens=128))

    print("Completion, greedy")
    [output] = llm.generate("The capital of France is", pj.SamplingParams(max_tokens=count))
    print("  ", output.completions[0].text.strip())

    print("Three samples of one prompt: its blocks are held once, only an unfinished one is copied")
    before = llm.stats()
    [output] = llm.generate(
        "A linked list is", pj.SamplingParams(max_tokens=count, n=3, temperature=0.8, top_p=0.95, seed=0)
    )
    for completion in output.completions:
        print("  ", completion.text.strip().replace("\n", " "))
    print(f"   {llm.stats().num_copies - before.num_copies} blocks copied")

    print("Two chats that begin alike: the second reuses what the first has computed")
    system = {"role": "system", "content": "You are a helpful assistant who answers in one short sentence. " * 3}
    for question in ("What is a cache?", "What is a page table?"):
        [output] = llm.chat([system, {"role": "user", "content": question}], pj.SamplingParams(max_tokens=count))
        print("  ", output.completions[0].text.strip())
        print(f"   {output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens came from the cache")


if __name__ == "__main__":
    main()
