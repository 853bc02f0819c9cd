"""Reranking, scores and classes over HTTP: equal to sentence-transformers, by Cohere's client;
wrong requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from e2e.sentence_models import random_model, save_base
from support.served import Served, forked

pytest.importorskip("starlette")

COMMON = ("--served-model-name", "small", "--num-threads", "1", "--dtype", "float32")
QUERY = "the cat sits on a mat"
DOCUMENTS = [
    "stock prices fell today",
    "dog",
    "I runs fast , Cat . you",
    "the dog sits on a mat today",
    "",
]
LABELS = {0: "bad", 1: "good", 2: "other"}
CLOSE = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = random_model("Bert", "ForSequenceClassification", num_labels=1)
    return save_base(tmp_path_factory.mktemp("reranker"), model)


@pytest.fixture(scope="module")
def theirs(root: Path) -> Any:
    from sentence_transformers import CrossEncoder

    return CrossEncoder(str(root), device="cpu")


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    with forked(str(root), *COMMON) as made:
        yield made


@pytest.fixture(scope="module")
def want(theirs: Any) -> np.ndarray:
    return np.array(theirs.predict([(QUERY, document) for document in DOCUMENTS]))


def post(server: Served, path: str, **fields: object) -> tuple[int, Any]:
    answer = server.ask(path, {"model": "small", **fields})
    return answer.status, answer.json


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_sorted(server: Served, want: np.ndarray, path: str) -> None:
    status, answer = post(server, path, query=QUERY, documents=DOCUMENTS)
    assert status == 200 and answer["id"].startswith("rerank-") and answer["model"] == "small"
    order = [each["index"] for each in answer["results"]]
    assert order == np.argsort(-want, kind="stable").tolist()
    found = [each["relevance_score"] for each in answer["results"]]
    np.testing.assert_allclose(found, want[order], **CLOSE)
    for each in answer["results"]:
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}


@pytest.mark.parametrize("version", [1, 2])
def test_the_client_of_cohere(server: Served, want: np.ndarray, version: int) -> None:
    cohere = pytest.importorskip("cohere")
    kind = cohere.Client if version == 1 else cohere.ClientV2
    fields = {"model": "small", "query": QUERY}
    with kind(base_url=server.url, api_key="none") as made:
        answer = made.rerank(**fields, documents=DOCUMENTS, top_n=2)
        with pytest.raises(cohere.errors.BadRequestError, match="documents has 0 entries"):
            made.rerank(**fields, documents=[])
    best = np.argsort(-want)[:2]
    assert [each.index for each in answer.results] == best.tolist()
    found = [each.relevance_score for each in answer.results]
    np.testing.assert_allclose(found, want[best], **CLOSE)


def test_documents_with_other_fields(server: Served, want: np.ndarray) -> None:
    given = [{"text": text, "id": f"d{place}"} for place, text in enumerate(DOCUMENTS)]
    _, answer = post(server, "/rerank", query=QUERY, documents=given, top_n=1)
    (best,) = answer["results"]
    assert best["document"] == given[int(np.argmax(want))]
    _, answer = post(server, "/rerank", query=QUERY, documents=given, return_documents=False)
    assert len(answer["results"]) == 5 and not any("document" in e for e in answer["results"])


def test_scores_of_pairs(server: Served, theirs: Any, want: np.ndarray) -> None:
    for path in ("/score", "/v1/score"):
        status, answer = post(server, path, text_1=QUERY, text_2=DOCUMENTS)
        assert status == 200 and [each["index"] for each in answer["data"]] == list(range(5))
        np.testing.assert_allclose([each["score"] for each in answer["data"]], want, **CLOSE)
    texts = DOCUMENTS[:4]
    pairs = list(zip(texts, texts[::-1], strict=True))
    _, answer = post(server, "/score", text_1=texts, text_2=texts[::-1])
    found = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(found, theirs.predict(pairs), **CLOSE)
    num_tokens = sum(len(theirs.tokenizer(*pair)["input_ids"]) for pair in pairs)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    _, raw = post(server, "/score", text_1=QUERY, text_2=DOCUMENTS[0], use_activation=False)
    logit = raw["data"][0]["score"]
    np.testing.assert_allclose(1 / (1 + np.exp(-logit)), want[0], **CLOSE)


def test_long_pairs_are_cut(server: Served, theirs: Any) -> None:
    long = "the dog runs fast today " * 30
    _, answer = post(server, "/score", text_1=QUERY, text_2=long, truncate_prompt_tokens=64)
    want = theirs.predict([(QUERY, long)])
    np.testing.assert_allclose(answer["data"][0]["score"], want[0], **CLOSE)
    _, answer = post(server, "/rerank", query=QUERY, documents=[long], truncate_prompt_tokens=20)
    assert answer["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        ("/rerank", {"query": QUERY}, "documents", "documents is missing"),
        ("/rerank", {"documents": DOCUMENTS}, "query", "query is missing"),
        ("/rerank", {"query": QUERY, "documents": []}, "documents", "has 0 entries"),
        ("/rerank", {"query": [QUERY], "documents": DOCUMENTS}, "query", "Expected `str`"),
        ("/rerank", {"query": "x", "documents": ["x", 3]}, "documents[1]", "Expected"),
        ("/rerank", {"query": "x", "documents": ["x", {"t": "x"}]}, "documents[1]", "no text"),
        ("/rerank", {"query": "x", "documents": ["x"], "top_n": -1}, "top_n", "1 or more"),
        ("/rerank", {"query": "x", "documents": ["x"] * 2049}, "documents", "2049 entries"),
        ("/rerank", {"query": "x", "texts": ["x"]}, "texts", "did you mean 'documents'"),
        ("/score", {"queries": "x", "documents": ["x"]}, "queries", "did you mean 'text_1'"),
        ("/score", {"text_1": ["x", "y"], "text_2": ["x"]}, "text_1", "text_1 has 2 texts and"),
        ("/score", {"text_1": "x", "text_2": []}, "text_2", "has 0 entries"),
        ("/score", {"text_1": "x", "text_2": ["x", 1]}, "text_2[1]", "Expected `str`"),
        ("/score", {"text_1": "x"}, "text_2", "text_2 is missing"),
        (
            "/score",
            {"text_1": "x", "text_2": "y", "truncate_prompt_tokens": 2},
            "truncate_prompt_tokens",
            "must be above 3",
        ),
    ],
)
def test_wrong_requests(
    server: Served, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    status, answer = post(server, path, **fields)
    assert status == 400 and words in answer["error"]["message"]
    assert answer["error"]["param"] == param


def test_the_model_embeds_nothing(server: Served) -> None:
    status, answer = post(server, "/v1/embeddings", input="x")
    assert status == 400 and answer["error"]["code"] == "not_supported"
    assert "small has the tasks classify, token_classify; use /classify" in str(answer)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    labels = {"id2label": LABELS, "label2id": {label: i for i, label in LABELS.items()}}
    model = random_model("Bert", "ForSequenceClassification", **labels)
    root = save_base(tmp_path_factory.mktemp("classifier"), model)
    with forked(str(root), *COMMON) as made:
        yield made, root


def test_texts_are_classified(classifier: tuple[Served, Path]) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    server, root = classifier
    model = AutoModelForSequenceClassification.from_pretrained(root).eval()
    tokenizer = AutoTokenizer.from_pretrained(root)
    status, answer = post(server, "/classify", input=DOCUMENTS)
    assert status == 200 and answer["id"].startswith("classify-")
    for text, each in zip(DOCUMENTS, answer["data"], strict=True):
        with torch.inference_mode():
            want = model(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        np.testing.assert_allclose(each["probs"], want.numpy(), **CLOSE)
        assert each["label"] == LABELS[int(want.argmax())] and each["num_classes"] == 3
    status, answer = post(server, "/rerank", query=QUERY, documents=DOCUMENTS)
    assert status == 400 and "3 classes, and a comparison needs a model with a single" in str(
        answer
    )
