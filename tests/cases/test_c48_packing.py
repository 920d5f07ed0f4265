"""C48: packing drops, repeats and pads nothing unseen (autoresearch PR#372, transformers PR#23429, PR#21952, gpt-neo PR#230)."""

import numpy as np
import pytest

from lit_gpt_loop.corpus import TextCorpus
from tests.lit_gpt_loop.small_data import data_of, fit, ready, store_of


def blocks(data):
    n = data.samples_per_epoch
    batches = [b for b, _ in zip(data.train_dataloader(), range(n), strict=False)]
    return np.concatenate([b["inputs"] for b in batches]), np.concatenate([b["targets"] for b in batches])


@pytest.mark.case("C48")
def test_c48_blocks_are_the_streams_prefix_and_the_rest_is_counted(tmp_path):
    text = "abcdefghijklmnopqrstuvwxy"  # 25 tokens, and the end token
    arguments = {
        "val_fraction": 0.0,
        "val_split": "tail",
        "shuffle": False,
        "micro_batch_size": 1,
        "global_batch_size": 1,
    }
    data = ready(data_of(tmp_path, corpus=TextCorpus([text]), context_length=8, **arguments))
    stream = [*text.encode(), data.eot_id]
    inputs, targets = blocks(data)
    assert inputs.flatten().tolist() == stream[:24]
    # Shifted by one, across the edges too: every token but the first.
    assert targets.flatten().tolist() == stream[1:25]
    assert data.num_train_tail_tokens == 1
    assert "1 at the end left out" in data.summary()


@pytest.mark.case("C48")
def test_c48_an_evaluation_pads_its_last_block_instead_of_leaving_it_out(tmp_path):
    texts = ["abcdefghijklmnopqrstuvwxy"] * 2
    data = ready(
        data_of(tmp_path, corpus=TextCorpus(texts), context_length=8, val_fraction=0.5, val_split="tail")
    )
    targets = np.concatenate([b["targets"] for b in data.val_dataloader()]).flatten()
    assert targets[targets != -100].tolist() == [*texts[0].encode(), data.eot_id][1:]


@pytest.mark.case("C48")
def test_c48_a_corpus_of_five_tokens_is_an_error_not_a_run_of_no_steps(tmp_path):
    data = data_of(tmp_path, corpus=TextCorpus(["abcd"]), context_length=8, val_fraction=0.0)
    with pytest.raises(ValueError, match=r"has 5 tokens, fewer than one block of context_length \+ 1 = 9"):
        fit(data, 1)


@pytest.mark.case("C48")
def test_c48_documents_longer_than_a_row_go_on_in_the_next_row(tmp_path):
    texts = ["abcdefghijklmnopqrstuvwxy", "xy"]
    arguments = {
        "val_fraction": 0.0,
        "shuffle": False,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "packed": False,
    }
    data = ready(data_of(tmp_path, corpus=TextCorpus(texts), context_length=8, **arguments))
    _, targets = blocks(data)
    valid = [row[row != -100].tolist() for row in targets]
    assert [len(v) for v in valid] == [8, 8, 8, 1, 2]
    assert [t for v in valid[:4] for t in v] == [*texts[0].encode(), data.eot_id][1:]
    assert valid[4] == [ord("y"), data.eot_id]


@pytest.mark.case("C48")
def test_c48_the_stream_does_not_depend_on_batches_or_processes(tmp_path):
    texts = [f"document {i} " * (i % 9 + 1) for i in range(50)]
    stores = [
        store_of(tmp_path / f"{p}-{b}", texts, num_processes=p, batch_documents=b)
        for p, b in ((1, 1), (1, 64), (3, 2))
    ]
    contents = [(s.path / "part-0001-of-0001" / "tokens.bin").read_bytes() for s in stores]
    assert contents[0] == contents[1] == contents[2]
