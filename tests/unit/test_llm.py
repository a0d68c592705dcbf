"""The Python API on a tiny model folder."""

import asyncio
import contextlib
import gc
import json
import pickle
import threading
import time

import pytest

import mlxinfer
from mlxinfer import ContextLengthError, InvalidRequestError
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def llm(folder):
    with mlxinfer.load(str(folder)) as model:
        yield model


GREEDY = {"temperature": 0, "max_tokens": 20}


def test_a_reply_is_a_string_that_knows_how_it_came_about(llm):
    reply = llm.chat("hello", **GREEDY)
    assert isinstance(reply, str)
    assert reply.usage.prompt_tokens == len(llm.prompt_ids("hello"))
    assert 1 <= reply.usage.completion_tokens <= 20
    assert reply.finish_reason in ("stop", "length")
    assert reply.timings.ttft_s > 0
    assert llm.tokenizer.decode(reply.token_ids) == reply
    assert f"{reply.usage.completion_tokens} new tokens" in reply._repr_markdown_()
    copy = pickle.loads(pickle.dumps(reply))
    assert copy == reply
    assert copy.usage == reply.usage


def test_stream_gives_the_same_text_in_pieces(llm):
    whole = llm.generate("the quick", **GREEDY)
    stream = llm.stream("the quick", raw=True, **GREEDY)
    pieces = list(stream)
    assert len(pieces) > 1
    assert "".join(pieces) == whole == stream.reply
    assert stream.reply.finish_reason == whole.finish_reason
    assert stream.reply.token_ids == whole.token_ids


def test_async_twins_give_the_same_text(llm):
    async def run():
        chat, raw = await asyncio.gather(llm.achat("hello", **GREEDY), llm.agenerate("the quick", **GREEDY))
        pieces = [piece async for piece in llm.astream("hello", **GREEDY)]
        return chat, raw, "".join(pieces)

    chat, raw, streamed = asyncio.run(run())
    assert chat == streamed == llm.chat("hello", **GREEDY)
    assert raw == llm.generate("the quick", **GREEDY)


def test_a_batch_equals_its_prompts_alone_in_order(llm):
    prompts = [f"question number {i} " * (i + 1) for i in range(12)]
    assert llm.batch(prompts, **GREEDY) == [llm.chat(p, **GREEDY) for p in prompts]
    assert llm.batch([], **GREEDY) == []


def test_many_threads_share_one_model(llm):
    expected = {i: llm.generate(f"number {i}", **GREEDY) for i in range(8)}
    got = {}

    def work(i):
        got[i] = llm.generate(f"number {i}", **GREEDY)

    threads = [threading.Thread(target=work, args=(i,)) for i in expected]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == expected


def test_a_stop_string_ends_the_text_just_before_it_wherever_tokens_are_cut(llm):
    free = llm.generate("the quick brown", temperature=0, max_tokens=40, ignore_eos=True)
    for start in range(2, len(free) - 3, 5):
        stop = free[start : start + 3]
        if not stop.isprintable() or "\ufffd" in stop:
            continue
        reply = llm.generate("the quick brown", temperature=0, max_tokens=40, ignore_eos=True, stop=stop)
        assert reply == free[: free.index(stop)]
        assert reply.finish_reason == "stop"


def test_a_seed_repeats_and_no_seed_varies(llm):
    hot = {"temperature": 1.5, "max_tokens": 30}
    assert llm.generate("a", seed=3, **hot) == llm.generate("a", seed=3, **hot)
    assert len({llm.generate("a", seed=s, **hot) for s in range(5)}) > 1
    assert len({llm.generate("a", **hot) for _ in range(5)}) > 1


def test_closing_a_stream_cancels_the_request_and_keeps_the_text_so_far(llm):
    stream = llm.stream("go on", raw=True, temperature=0, max_tokens=1500, ignore_eos=True)
    first = next(stream)
    stream.close()
    assert stream.reply.startswith(first)
    assert stream.reply.finish_reason == "cancelled"
    assert stream.reply.usage.completion_tokens < 1500
    wait_idle(llm)


def test_leaving_an_iteration_early_frees_the_request(llm):
    for _ in llm.stream("go on", raw=True, temperature=0, max_tokens=1500, ignore_eos=True):
        break
    gc.collect()
    wait_idle(llm)

    async def leave():
        async for _ in llm.astream("go on", temperature=0, max_tokens=1500, ignore_eos=True):
            break

    asyncio.run(leave())
    wait_idle(llm)


def wait_idle(llm):
    deadline = time.monotonic() + 5
    while llm.stats()["running"] or llm.stats()["waiting"]:
        assert time.monotonic() < deadline, llm.stats()
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 10**5000}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": {320: 1.0}}, "logit_bias"),
        ({"logit_bias": {2**31: 1.0}}, "logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_bad_parameter_is_named_before_any_work(llm, changes, param):
    steps = llm.stats()["steps"]
    with pytest.raises(InvalidRequestError) as caught:
        llm.generate("a", **changes)
    assert caught.value.param == param
    assert llm.stats()["steps"] == steps


def test_the_context_limit_is_enforced_before_work_and_the_message_has_the_numbers(llm):
    steps = llm.stats()["steps"]
    with pytest.raises(ContextLengthError, match=r"3000 tokens and the context is 2048"):
        llm.generate([5] * 3000)
    with pytest.raises(ContextLengthError, match=r"at most 1948"):
        llm.generate([5] * 100, max_tokens=1949)
    assert llm.stats()["steps"] == steps
    assert llm.generate([5] * 2040, temperature=0, ignore_eos=True).usage.completion_tokens == 8


@pytest.mark.parametrize("ids", [[], [320], [-1], [5, 10**9]])
def test_token_ids_outside_the_vocabulary_are_refused(llm, ids):
    with pytest.raises(InvalidRequestError):
        llm.generate(ids)


def test_a_bad_prompt_in_a_batch_fails_before_any_work(llm):
    steps = llm.stats()["steps"]
    with pytest.raises(ContextLengthError):
        llm.batch(["fine", "word " * 5000])
    assert llm.stats()["steps"] == steps


def test_the_models_generation_config_gives_the_defaults(tmp_path):
    folder = tiny.write_folder(tmp_path / "m", generation={"do_sample": False, "eos_token_id": [1, 2]})
    with mlxinfer.load(str(folder)) as llm:
        assert llm.defaults.temperature == 0.0
        assert llm.generate("a", max_tokens=20) == llm.generate("a", max_tokens=20, temperature=0)
        assert llm.tokenizer.eos_token_ids >= {1, 2}
    other = tiny.write_folder(tmp_path / "n", generation={"temperature": 0.4, "top_k": 7, "top_p": 0.8})
    with mlxinfer.load(str(other)) as llm:
        assert (llm.defaults.temperature, llm.defaults.top_k, llm.defaults.top_p) == (0.4, 7, 0.8)


def test_a_request_that_is_dropped_before_it_is_read_is_cancelled(llm):
    params = mlxinfer.SamplingParams(max_tokens=1800, temperature=0, ignore_eos=True)
    generation = llm.submit([5, 6], params)
    del generation
    stream = llm.stream("go on", raw=True, params=params)
    del stream
    gc.collect()
    wait_idle(llm)


def test_an_event_loop_that_is_closed_under_a_stream_ends_its_request(llm):
    async def start():
        pieces = llm.astream("go on", temperature=0, max_tokens=1500, ignore_eos=True)
        await anext(pieces)
        return pieces

    loop = asyncio.new_event_loop()
    pieces = loop.run_until_complete(start())
    loop.close()
    wait_idle(llm)
    with contextlib.suppress(StopIteration):
        pieces.aclose().send(None)


def test_a_stop_string_frees_the_row_long_before_max_tokens(llm):
    free = llm.generate("the quick brown", temperature=0, max_tokens=40, ignore_eos=True)
    stop = free[4:6]
    steps = llm.stats()["steps"]
    reply = llm.generate("the quick brown", temperature=0, max_tokens=1500, ignore_eos=True, stop=stop)
    assert reply.finish_reason == "stop"
    assert reply.usage.completion_tokens < 40
    wait_idle(llm)
    assert llm.stats()["steps"] - steps < 100


def test_text_held_back_for_a_stop_string_that_never_came_is_given_at_the_end(llm):
    free = llm.generate("the quick", temperature=0, max_tokens=15, ignore_eos=True)
    held = free[-1] + "\x00never"
    assert llm.generate("the quick", temperature=0, max_tokens=15, ignore_eos=True, stop=held) == free


def test_the_end_token_counts_and_is_neither_in_the_text_nor_in_the_ids(llm):
    for seed in range(200):
        reply = llm.generate("hello", temperature=3.0, max_tokens=60, seed=seed)
        if reply.finish_reason == "stop":
            assert reply.usage.completion_tokens == len(reply.token_ids) + 1
            assert "<|im_end|>" not in reply
            return
    raise AssertionError("no reply ended by itself")


def test_ids_without_text_are_given_too(llm):
    biased = llm.generate("a", temperature=0, max_tokens=3, logit_bias={0: 100.0})
    assert biased == ""
    assert biased.token_ids == (0, 0, 0)


def test_a_generation_can_be_read_once(llm):
    generation = llm.submit([5, 6], mlxinfer.SamplingParams(max_tokens=2))
    generation.result()
    with pytest.raises(RuntimeError, match="once"):
        next(iter(generation))


def test_a_stream_can_be_closed_from_another_thread(llm):
    stream = llm.stream("go on", raw=True, temperature=0, max_tokens=1500, ignore_eos=True)
    next(stream)
    closer = threading.Timer(0.1, stream.close)
    closer.start()
    list(stream)
    closer.join()
    assert stream.reply.finish_reason == "cancelled"


def test_leaving_a_with_block_by_an_error_keeps_that_error(tmp_path):
    llm = mlxinfer.load(tiny.write_folder(tmp_path / "m"))

    def fails() -> None:
        with llm.stream("go on", raw=True, max_tokens=1500, ignore_eos=True) as stream:
            next(stream)
            llm.unload()
            raise KeyError

    with pytest.raises(KeyError):
        fails()


def test_settings_reach_the_engine(tmp_path):
    folder = tiny.write_folder(tmp_path / "m")
    with mlxinfer.load(folder, context_length=50, max_num_seqs=2, max_queue=1, prefill_chunk=9) as llm:
        assert llm.info.context_length == 50
        assert (llm._engine.state.max_num_seqs, llm._engine.state.prefill_chunk) == (2, 9)
        prompts = [f"number {i}" for i in range(12)]
        assert len(llm.batch(prompts, max_tokens=3)) == 12, "a batch waits for its own earlier prompts"
        held = [llm.submit([5] * 20, mlxinfer.SamplingParams(max_tokens=25, ignore_eos=True)) for _ in range(3)]
        with pytest.raises(mlxinfer.QueueFullError):
            llm.submit([5], mlxinfer.SamplingParams(max_tokens=1))
        for generation in held:
            generation.cancel()
    with pytest.raises(InvalidRequestError, match="max_num_seqs"):
        mlxinfer.load(folder, max_num_seqs=0)
    with pytest.raises(InvalidRequestError, match="dtype"):
        mlxinfer.load(folder, dtype="bogus")


def test_an_override_does_not_ask_the_environment_again(tmp_path, monkeypatch):
    from mlxinfer.config import Settings

    monkeypatch.setenv("MLXINFER_CONTEXT_LENGTH", "77")
    folder = tiny.write_folder(tmp_path / "m")
    with mlxinfer.load(folder, settings=Settings(), max_num_seqs=2) as llm:
        assert llm.info.context_length == 2048
    with mlxinfer.load(folder) as llm:
        assert llm.info.context_length == 77


def test_the_catalogues_sampling_fills_what_the_model_leaves_open(monkeypatch):
    from mlxinfer import llm as module

    own = mlxinfer.SamplingParams(top_k=3)
    defaults = module._defaults("smollm2-135m", own)
    assert (defaults.temperature, defaults.repetition_penalty, defaults.top_k) == (0.0, 1.1, 3)
    assert module._defaults("no-such-alias", own) == own


def test_a_higher_priority_overtakes(llm):
    filler = [llm.submit([5] * 300, mlxinfer.SamplingParams(max_tokens=1, temperature=0)) for _ in range(20)]
    order = []

    def note(name, generation):
        generation.result()
        order.append(name)

    low = llm.submit([6] * 900, mlxinfer.SamplingParams(max_tokens=1, temperature=0), priority=0)
    high = llm.submit([7] * 900, mlxinfer.SamplingParams(max_tokens=1, temperature=0), priority=9)
    threads = [threading.Thread(target=note, args=a) for a in (("low", low), ("high", high))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for generation in filler:
        generation.result()
    assert order == ["high", "low"]


def test_numpys_integers_are_token_ids(llm):
    import numpy as np

    assert llm.generate(np.array([5, 6, 7]), **GREEDY) == llm.generate([5, 6, 7], **GREEDY)
    assert llm.generate(list(np.array([5, 6, 7])), **GREEDY) == llm.generate([5, 6, 7], **GREEDY)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate([5.0, 6.5]),
        lambda llm: llm.generate([True, True]),
        lambda llm: llm.generate(["a"]),
        lambda llm: llm.generate([{"role": "user", "content": "x"}]),
        lambda llm: llm.generate(b"x"),
        lambda llm: llm.generate(5),
        lambda llm: llm.submit([5], mlxinfer.SamplingParams(), priority="high"),
        lambda llm: llm.submit([5], mlxinfer.SamplingParams(), priority=None),
        lambda llm: llm.chat(None),
        lambda llm: llm.chat(b"x"),
        lambda llm: llm.chat([]),
        lambda llm: llm.chat({"role": "user", "content": "x"}),
        lambda llm: llm.chat(["x"]),
        lambda llm: llm.chat([{"role": "user"}]),
        lambda llm: llm.chat([{"content": "x"}]),
        lambda llm: llm.chat([{"role": 5, "content": "x"}]),
        lambda llm: llm.chat([{"role": "user", "content": None}]),
        lambda llm: llm.chat([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], system="z"),
        lambda llm: llm.batch("Name a fruit."),
        lambda llm: llm.batch(["fine", None]),
        lambda llm: llm.stream("x", raw=True, system="y"),
        lambda llm: llm.generate("a", stop=5),
    ],
)
def test_a_wrong_call_is_a_clear_error_and_a_running_stream_goes_on(llm, call):
    expected = llm.generate("the quick", temperature=0, max_tokens=60, ignore_eos=True)
    stream = llm.stream("the quick", raw=True, temperature=0, max_tokens=60, ignore_eos=True)
    next(stream)
    with pytest.raises(InvalidRequestError):
        call(llm)
    list(stream)
    assert stream.reply == expected


def test_values_for_the_chat_template_reach_it(tmp_path):
    folder = tiny.write_folder(tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% if loud %}LOUD {% endif %}" + tiny.CHATML
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with mlxinfer.load(folder) as llm:
        quiet, loud = llm.prompt_ids("hello"), llm.prompt_ids("hello", loud=True)
        assert loud == llm.tokenizer.encode("LOUD ", add_special_tokens=False) + quiet
        options = {"template": {"loud": True}, "temperature": 0, "max_tokens": 3}
        assert llm.chat("hello", **options).usage.prompt_tokens == len(loud)
        assert asyncio.run(llm.achat("hello", **options)).usage.prompt_tokens == len(loud)
        assert llm.batch(["hello"], **options)[0].usage.prompt_tokens == len(loud)
        stream = llm.stream("hello", **options)
        list(stream)
        assert stream.reply.usage.prompt_tokens == len(loud)
        with pytest.raises(InvalidRequestError, match="template"):
            llm.stream("hello", raw=True, template={"loud": True})


def test_batches_can_be_raw_or_awaited(llm):
    raw = llm.batch(["the quick", [5, 6, 7]], raw=True, **GREEDY)
    assert raw == [llm.generate("the quick", **GREEDY), llm.generate([5, 6, 7], **GREEDY)]
    assert asyncio.run(llm.abatch(["hello"], **GREEDY)) == [llm.chat("hello", **GREEDY)]
