"""Two users stream at once from one engine; text is printed as it comes."""

import asyncio

from engine import AsyncLLMEngine, EngineArgs, SamplingParams


async def stream(engine: AsyncLLMEngine, name: str, prompt: str) -> str:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=1, output_kind="delta")
    pieces = []
    async for output in engine.generate(prompt, params, request_id=name):
        pieces.append(output.outputs[0].text)
        print(f"{name}: {pieces[-1]!r}")
    return "".join(pieces)


async def main() -> None:
    engine = AsyncLLMEngine.from_engine_args(EngineArgs(max_model_len=512))
    try:
        texts = await asyncio.gather(
            stream(engine, "first", "A list comprehension"),
            stream(engine, "second", "The import statement"),
        )
    finally:
        engine.shutdown()
    print(*texts, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
