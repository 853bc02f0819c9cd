"""Embeddings over HTTP: equal to sentence-transformers, by the clients that people use; wrong
requests."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.sentence_models import VOCAB, save_sentences
from support.patience import WAIT_SECONDS
from support.schema_fuzz import fuzz
from support.served import Served, forked

openai = pytest.importorskip("openai")

COMMON = ("--served-model-name", "small", "--num-threads", "1", "--dtype", "float32")
TEXTS = ["the cat sits on a mat", "stock prices fell today", "dog", "I runs fast , Cat . you"]
PROMPTS = {"query": "query : ", "passage": "passage : "}
LONGEST = 40
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sentence_transformers.base.modules import Normalize
    from sentence_transformers.sentence_transformer.modules import Pooling

    return save_sentences(
        tmp_path_factory.mktemp("embedder"),
        "Bert",
        [Pooling(32, "mean"), Normalize()],
        transformer={"max_seq_length": LONGEST},
        prompts=PROMPTS,
    )


@pytest.fixture(scope="module")
def theirs(root: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(root), device="cpu")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    with forked(str(root), *COMMON) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server: Served, path: str = "/v1/embeddings", **fields: object) -> tuple[int, Any]:
    answer = server.ask(path, {"model": "small", **fields})
    return answer.status, answer.json


def vectors_of(answer: Any) -> np.ndarray:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


@pytest.mark.parametrize("form", ["float", "base64", None])
def test_the_client_of_openai(client: Any, theirs: Any, form: str | None) -> None:
    """It requests base64 by default."""
    options = {} if form is None else {"encoding_format": form}
    answer = client.embeddings.create(model="small", input=TEXTS, user="me", **options)
    found = [each.embedding for each in answer.data]
    if form == "base64":
        found = [np.frombuffer(base64.b64decode(each), "<f4") for each in found]
    np.testing.assert_allclose(np.array(found), theirs.encode(TEXTS), **CLOSE)
    num_tokens = sum(len(theirs.tokenizer(text)["input_ids"]) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens
    assert answer.model == "small" and answer.data[2].index == 2


def test_the_client_of_langchain(server: Served, theirs: Any) -> None:
    made = pytest.importorskip("langchain_openai").OpenAIEmbeddings(
        model="small",
        base_url=f"{server.url}/v1",
        api_key="none",
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    np.testing.assert_allclose(made.embed_documents(TEXTS), theirs.encode(TEXTS), **CLOSE)
    np.testing.assert_allclose(made.embed_query(TEXTS[0]), theirs.encode(TEXTS[0]), **CLOSE)


def test_inputs_of_every_form(server: Served, theirs: Any) -> None:
    ids = [theirs.tokenizer(text)["input_ids"] for text in TEXTS]
    want = theirs.encode(TEXTS)
    for given, expected in (
        (TEXTS, want), (TEXTS[0], want[:1]), (ids, want), (ids[1], want[1:2]),
    ):  # fmt: skip
        status, answer = post(server, input=given)
        assert status == 200 and answer["object"] == "list"
        np.testing.assert_allclose(vectors_of(answer), expected, **CLOSE)
    plain = theirs.tokenizer(TEXTS[0], add_special_tokens=False)["input_ids"]
    bare, by_ids = post(server, input=TEXTS[0], add_special_tokens=False), post(server, input=plain)
    assert bare[1]["usage"]["prompt_tokens"] == len(plain)
    np.testing.assert_array_equal(vectors_of(bare[1]), vectors_of(by_ids[1]))


def test_prompts_by_name(server: Served, theirs: Any) -> None:
    for name in PROMPTS:
        _, answer = post(server, input=TEXTS, prompt_name=name)
        want = theirs.encode(TEXTS, prompt_name=name)
        np.testing.assert_allclose(vectors_of(answer), want, **CLOSE)


def test_long_texts_are_cut_as_the_directory_says(server: Served, theirs: Any) -> None:
    long = "the cat runs fast " * 30
    _, answer = post(server, input=long)
    assert answer["usage"]["prompt_tokens"] == LONGEST
    np.testing.assert_allclose(vectors_of(answer)[0], theirs.encode(long), **CLOSE)
    _, answer = post(server, input=long, truncate_prompt_tokens=7)
    want = theirs.encode("the cat runs fast the")
    np.testing.assert_allclose(vectors_of(answer)[0], want, **CLOSE)


def test_many_inputs_of_many_clients(server: Served, theirs: Any) -> None:
    words = [word for text in TEXTS for word in text.split()]
    texts = [f"{words[i % 16]} {words[i // 16 % 16]} {words[i // 256]}" for i in range(2048)]
    with ThreadPoolExecutor(4) as threads:
        parts = [texts, texts[:700], texts[700:], texts[5:6]]
        answers = list(threads.map(lambda part: post(server, input=part)[1], parts))
    found = [vectors_of(answer) for answer in answers]
    np.testing.assert_allclose(found[0], theirs.encode(texts, batch_size=256), **CLOSE)
    np.testing.assert_allclose(np.concatenate(found[1:3]), found[0], **CLOSE)


def test_vectors_without_their_last_operation_and_of_each_token(
    server: Served, theirs: Any
) -> None:
    _, raw = post(server, input=TEXTS[0], use_activation=False)
    length = np.linalg.norm(vectors_of(raw)[0])
    np.testing.assert_allclose(vectors_of(raw)[0] / length, theirs.encode(TEXTS[0]), **CLOSE)
    assert abs(length - 1) > 1e-3
    want = theirs.encode(TEXTS[0], output_value="token_embeddings").numpy()
    fields = {"input": TEXTS[:1], "task": "token_embed", "use_activation": False}
    _, answer = post(server, "/pooling", **fields)
    np.testing.assert_allclose(answer["data"][0]["data"], want, **CLOSE)
    _, packed = post(server, "/pooling", **fields, encoding_format="base64")
    (only,) = packed["data"]
    numbers = np.frombuffer(base64.b64decode(only["data"]), "<f4").reshape(only["shape"])
    np.testing.assert_array_equal(numbers, np.array(answer["data"][0]["data"], np.float32))


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": []}, "input", "has 0 entries, must have 1 to 2048"),
        ({"input": ["x"] * 2049}, "input", "has 2049 entries"),
        ({"input": ["x", [1]]}, "input", "a text, a list of token ids, or a list of either"),
        ({"input": 3}, "input", "input"),
        ({"input": {"text": "x"}}, "input", "input"),
        ({"input": [["x"]]}, "input[0][0]", "Expected `int`"),
        ({"input": [[3], [VOCAB]]}, "input[1]", f"input[1]: token id {VOCAB} is not in"),
        ({"input": [[3], [-1]]}, "input[1]", "token id -1"),
        ({"input": [[3], [1 << 70]]}, "input[1]", "input must be integers"),
        ({"input": [True]}, "input[0]", "got `bool`"),
        ({"input": None}, "input", "input is missing"),
        ({"input": [VOCAB]}, "input", f"input: token id {VOCAB} is not in"),
        ({"input": [[3], []]}, "input[1]", "input[1]: the prompt is empty"),
        ({}, "input", "input is missing"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "float, base64"),
        ({"input": "x", "dimensions": 16}, "dimensions", "not trained for fewer than 32"),
        ({"input": "x", "dimensions": 0}, "dimensions", "must be 1 or more"),
        ({"input": "x", "dimensions": "16"}, "dimensions", "Expected `int"),
        ({"input": "x", "prompt_name": "qery"}, "prompt_name", "did you mean 'query'"),
        ({"input": [3], "prompt_name": "query"}, "prompt_name", "give texts"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be 1 or"),
        ({"input": "x", "priority": 1 << 64}, "priority", "64 bits"),
        ({"input": "x", "timeout": 0}, "timeout", "above 0"),
        ({"input": "x", "normalize": True}, "normalize", "not supported"),
        ({"inputs": "x"}, "inputs", "did you mean 'input'"),
        ({"input": "x", "model": "large"}, "model", "must be one of: small"),
    ],
)
def test_wrong_requests(server: Served, fields: dict[str, Any], param: str, words: str) -> None:
    status, answer = post(server, **fields)
    assert status == (404 if param == "model" else 400)
    assert answer["error"]["param"] == param and words in answer["error"]["message"]


def test_one_wrong_input_fails_its_request_and_no_other(server: Served, theirs: Any) -> None:
    with ThreadPoolExecutor(8) as threads:
        wrong = [threads.submit(post, server, input=[[3]] * 99 + [[VOCAB]]) for _ in range(4)]
        good = [threads.submit(post, server, input=TEXTS) for _ in range(4)]
        for each in wrong:
            status, answer = each.result()
            assert status == 400 and answer["error"]["param"] == "input[99]"
        for each in good:
            np.testing.assert_allclose(vectors_of(each.result()[1]), theirs.encode(TEXTS), **CLOSE)


def test_the_model_generates_no_text(server: Served, client: Any) -> None:
    for path, fields in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [], "max_tokens": 1}),
    ):
        status, answer = post(server, path, **fields)
        message = answer["error"]["message"]
        assert status == 400 and f"{path} is not supported: small returns vectors" in message
    status, answer = post(server, "/classify", input="x")
    assert status == 400 and "small has the tasks embed, token_embed" in answer["error"]["message"]
    assert [model.id for model in client.models.list()] == ["small"]


def test_texts_are_scored_by_their_embeddings(server: Served, theirs: Any) -> None:
    queries, documents = theirs.encode_query(TEXTS), theirs.encode_document(TEXTS[::-1])
    want = theirs.similarity(queries, documents).numpy()
    _, answer = post(server, "/score", text_1=TEXTS, text_2=TEXTS[::-1])
    np.testing.assert_allclose([each["score"] for each in answer["data"]], want.diagonal(), **CLOSE)
    _, answer = post(server, "/rerank", query=TEXTS[0], documents=TEXTS[::-1])
    found = {each["index"]: each["relevance_score"] for each in answer["results"]}
    np.testing.assert_allclose([found[i] for i in range(4)], want[0], **CLOSE)
    scores = [each["relevance_score"] for each in answer["results"]]
    assert scores == sorted(scores, reverse=True)


def test_figures_and_tokens(server: Served) -> None:
    assert post(server, "/tokenize", prompt="the cat")[1]["count"] == 4
    before = figure(server, "metronome_prompt_tokens_total")
    num_tokens = post(server, input=TEXTS)[1]["usage"]["prompt_tokens"]
    after = figure(server, "metronome_prompt_tokens_total")
    assert after - before == num_tokens
    assert figure(server, "metronome_generation_tokens_total") == 0.0
    assert figure(server, "vllm:request_prefill_time_seconds_count") > 4


def figure(server: Served, name: str) -> float:
    page = server.ask("/metrics").body.decode().splitlines()
    (line,) = [line for line in page if line.startswith(f"{name}{{")]
    return float(line.rpartition(" ")[2])


@pytest.mark.slow
def test_the_server_does_as_its_document_says(server: Served) -> None:
    found = fuzz(server.url, examples=3, seed=1, seconds=WAIT_SECONDS)
    assert found.status == 0, found.said
    assert found.num_cases > 300
