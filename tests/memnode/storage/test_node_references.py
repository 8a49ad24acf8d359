"""Uploads, checkpoints and links of several runs in any order: every block has exactly the references that exist."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deepvm.memnode.errors import RequestRefused
from deepvm.memnode.monitoring.counters import Counters
from deepvm.memnode.monitoring.log import Log
from deepvm.memnode.settings import Settings
from deepvm.memnode.storage.arena import Arena
from deepvm.memnode.storage.budgets import KeptDocuments
from deepvm.memnode.storage.dedup import MOST_FALSE, Dedup
from deepvm.memnode.storage.registry import Runs
from deepvm.memnode.storage.run import Run
from deepvm.memnode.storage.upload import Begin, Upload
from deepvm.memnode.writeback.writeback import Writeback
from deepvm.protocol import frames
from deepvm.protocol.placement import Share
from deepvm.store.base import Manifest
from tests.support.memnode.client import BLOCK, content, digest_of

BLOCKS, BUFFERS = 10, 2
CONTENTS = [content(seed, BLOCK) for seed in range(5)]
KEY = frames.content_key("node", "client")
RUN = st.sampled_from(["one", "two", "three"])
CHUNK = st.integers(0, 3)
SEED = st.integers(0, len(CONTENTS) - 1)


def expect(no: RequestRefused, *codes: str) -> None:
    assert no.code in codes


class Node(RuleBasedStateMachine):
    """The parts of a node below its connections."""

    def __init__(self) -> None:
        super().__init__()
        self.arena, counters = Arena(BLOCKS * BLOCK, BLOCK), Counters()
        outlet = Writeback(Settings(capacity_bytes=BLOCKS * BLOCK, block_bytes=BLOCK), Log(None))
        self.runs = Runs(self.arena, outlet, counters, KeptDocuments(2**30), most=10)
        self.counters, self.sessions, self.step = counters, 0, 0
        for name in ("one", "two", "three"):
            self.runs.add(name, "00" * 32).claim("0")

    def teardown(self) -> None:
        for run in self.runs:
            run.claim("the last")
            for step in list(run.checkpoints):
                run.delete(step, None)
        assert (self.arena.used, self.arena.reserved) == (0, 0)
        assert not self.arena._contents
        assert not self.arena._by_content
        self.arena.close()

    def upload(self, name: str) -> Upload | None:
        return next(reversed(self.of(name).uploads.values()), None)

    def of(self, name: str) -> Run:
        run = self.runs.find(name)
        assert run is not None
        return run

    # --- what clients do ------------------------------------------------------------------------------------------

    @rule(name=RUN, chunks=st.integers(1, 4), lean=st.booleans())
    def begin(self, name: str, chunks: int, lean: bool) -> None:
        self.step += 1
        begin = Begin(
            step=self.step,
            size_bytes=chunks * BLOCK,
            layout="",
            rank=0,
            world_size=1,
            share=Share(),
            partial_reservation=lean,
        )
        try:
            self.of(name).begin(begin, self.of(name).session, buffers=BUFFERS, room_s=0)
        except RequestRefused as no:
            expect(no, "no-room")
            assert not lean

    @rule(name=RUN, seeds=st.lists(SEED, min_size=1, max_size=4), lean=st.booleans(), honest=st.booleans())
    def save(self, name: str, seeds: list[int], lean: bool, honest: bool) -> None:
        """As trainers do: what others have is linked, the rest is put. Single steps alone seldom make a checkpoint."""
        self.begin(name, len(seeds), lean)
        upload = self.upload(name)
        if upload is None or upload.begin.step != self.step:
            return
        self.link(name, dict(enumerate(seeds)), honest)
        for chunk, seed in enumerate(seeds):
            if chunk not in upload.blocks:
                self.put(name, chunk, seed, True)
        self.publish(name)

    @rule(name=RUN, chunk=CHUNK, seed=SEED, whole=st.booleans())
    def put(self, name: str, chunk: int, seed: int, whole: bool) -> None:
        upload = self.upload(name)
        if upload is None or chunk >= upload.chunks:
            return
        try:
            block = upload.start()
        except RequestRefused as no:
            expect(no, "busy", "no-room")
            return
        self.arena.view(block, BLOCK)[:] = CONTENTS[seed]
        if whole:
            upload.finish(chunk, block, digest_of(CONTENTS[seed]))
        else:
            upload.cancel(block)

    @rule(name=RUN, seeds=st.dictionaries(CHUNK, SEED, min_size=1), honest=st.booleans())
    def link(self, name: str, seeds: dict[int, int], honest: bool) -> None:
        upload = self.upload(name)
        if upload is None:
            return
        offers = []
        for chunk, seed in seeds.items():
            if chunk < upload.chunks:
                bytes_had = CONTENTS[seed] if honest else b"something else"
                offers.append((chunk, digest_of(CONTENTS[seed]), frames.content_proof(KEY, [memoryview(bytes_had)])))
        linked = Dedup(self.arena, KEY, self.counters, Log(None)).link(upload, offers)
        assert len(offers) <= MOST_FALSE
        known = self.arena.contains((digest, BLOCK) for _, digest, _ in offers)
        assert linked == [chunk for (chunk, _, _), here in zip(offers, known, strict=True) if here and honest]

    @rule(name=RUN, chunk=CHUNK)
    def keep(self, name: str, chunk: int) -> None:
        upload, run = self.upload(name), self.of(name)
        if upload is None or not run.checkpoints or chunk >= upload.chunks:
            return
        base = run.in_order()[-1]
        digests = base.manifest.digests
        try:
            upload.keep(base, [chunk], [digests[chunk] if chunk < len(digests) else 0])
        except RequestRefused as no:
            expect(no, "not-found")
            assert chunk >= len(digests)

    @rule(name=RUN)
    def publish(self, name: str) -> None:
        upload, run = self.upload(name), self.of(name)
        if upload is None or len(upload.blocks) < upload.chunks:
            return
        manifest = Manifest(
            run=name,
            step=upload.begin.step,
            size_bytes=upload.begin.size_bytes,
            chunk_bytes=BLOCK,
            digests=[upload.digests[chunk] for chunk in range(upload.chunks)],
            created_s=float(self.step),
        )
        run.publish(upload.begin.step, manifest.to_bytes(), 0, run.session, buffers=BUFFERS)

    @rule(name=RUN)
    def abort(self, name: str) -> None:
        upload = self.upload(name)
        if upload is not None:
            self.of(name).abort(upload.begin.step, self.of(name).session, 0)

    @rule(name=RUN)
    def delete(self, name: str) -> None:
        for step in list(self.of(name).checkpoints)[:1]:
            self.of(name).delete(step, None)

    @rule(name=RUN)
    def restart(self, name: str) -> None:
        self.sessions += 1
        self.of(name).claim(str(self.sessions))

    # --- what always holds ----------------------------------------------------------------------------------------

    @invariant()
    def every_reference_is_counted_and_no_other(self) -> None:
        held: Counter[int] = Counter()
        for run in self.runs:
            for upload in run.uploads.values():
                held.update(upload.blocks.values())
            for checkpoint in run.checkpoints.values():
                held.update(checkpoint._blocks.values())
        assert {block: count for block, count in enumerate(self.arena._counts) if count} == dict(held)
        assert self.arena.used == len(held)
        reserved = sum(upload._reserved for run in self.runs for upload in run.uploads.values())
        assert self.arena.reserved == reserved <= BLOCKS - len(held)

    @invariant()
    def what_is_found_by_content_has_that_content(self) -> None:
        for block, (digest, length) in self.arena._contents.items():
            assert digest_of(bytes(self.arena.view(block, length))) == digest
        assert {b for blocks in self.arena._by_content.values() for b in blocks} == set(self.arena._contents)

    @invariant()
    def every_checkpoint_is_whole_and_its_blocks_can_be_found(self) -> None:
        for run in self.runs:
            for checkpoint in run.checkpoints.values():
                for chunk, digest in enumerate(checkpoint.manifest.digests):
                    with checkpoint.chunk(chunk) as view:
                        assert digest_of(bytes(view)) == digest
                assert set(checkpoint._blocks.values()) <= set(self.arena._contents)


TestReferences = Node.TestCase
TestReferences.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
