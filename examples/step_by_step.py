"""The engine one step at a time: add requests whenever, look at every step's outputs."""

from engine import EngineArgs, LLMEngine, SamplingParams

PROMPTS = ["A list comprehension", "Return the number of", "The import statement"]


def main() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(max_model_len=512))
    params = SamplingParams(max_tokens=24, temperature=0.0)
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(f"request-{index}", prompt, params)
    num_steps = 0
    while engine.has_unfinished_requests():
        num_steps += 1
        for output in engine.step():
            if output.finished:
                print(f"step {num_steps}: {output.prompt}{output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
