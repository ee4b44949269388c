"""AttentionBackendContract: what an attention backend must keep, for every size and feature that it is said to have."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st

from tokenyard.testing.attention import NO_BLOCKS, alone, tables_of
from tokenyard.testing.contracts.attention_capture import RecordedStep
from tokenyard.testing.contracts.attention_memory import sparse_zeros
from tokenyard.testing.contracts.attention_rig import check_changed, compare
from tokenyard.testing.contracts.attention_steps import (
    StepShape,
    part_of,
    passed,
    sharing,
    with_tables,
)
from tokenyard.testing.contracts.attention_suite import IMPOSSIBLE, ODD, PLAIN, AttentionSuite, Features, checked_layout
from tokenyard.testing.contracts.base import expect

_FAR = 2**31  # elements: an offset beyond does not fit 32 bits


class AttentionBackendContract(AttentionSuite):
    """Set `overrides = ["attention=NAME"]`, with options `["attention=NAME", "attention.OPTION=1"]`.

    What the backend is said to have is tested, and only what it is said to have: `supports` must accept all of it, in
    any combination of sizes, and refuse what the suite knows besides.

    - `dtypes`, `head_dims`, `group_sizes` (query heads a KV head), `block_sizes`: at first float32, bfloat16, float16;
      64, 80, 96, 128, 256; 1, 3, 4, 8; 1, 16, 32, 64, 128. `v_head_dims`: pairs of head sizes of keys and values that
      differ, at first (96, 64); empty = they must not.
    - `windows`, `soft_caps`, `sinks`: whether layers may have them. `has_lse` and `can_capture` are the backend's word.
    - `same_bits`: a float32 row has the same bits in a batch and alone; otherwise it may differ as from the reference.
    - `device`: where the tensors are, at first the CPU. `device_type`: what the AttentionSpec says, None = the same.
    - `longest_query`, `longest_context`, in tokens, and `max_examples` make a slow backend's tests short.

    Numbers are compared with attention in float64, `tokenyard.testing.attention.expect_attention`, which says how far
    they may be off. Not tested: a K/V cache of another data type than the query.
    """

    # ---- What it says ---------------------------------------------------------------------------------------------

    def test_what_is_claimed_is_accepted_and_nothing_else(self) -> None:
        """`attention.claims`: `supports` accepts what the suite's class claims; what it does not claim is refused."""
        for shape in self._claimed_shapes():
            self._check_accepted(self._spec(shape))
        for features in self._claimed_features():
            self._check_accepted(self._spec(self._first_shape([(1, 1)]), features))
        for name, spec in self._unclaimed():
            what = f"supports() accepts {spec}, which {name} of the suite leaves out: nothing would test it"
            expect(bool(self._supports(spec)), "attention.claims", what)

    def test_what_it_refuses_has_reasons(self) -> None:
        """`attention.reasons`: `supports` never raises, gives a sentence a reason, and refuses what cannot work."""
        good = self._spec(self._first_shape([(1, 1)]))
        for changes in ODD:
            self._supports(dataclasses.replace(good, **changes))  # type: ignore[arg-type]
        for changes in IMPOSSIBLE:
            reasons = self._supports(dataclasses.replace(good, **changes))  # type: ignore[arg-type]
            expect(bool(reasons), "attention.reasons", f"supports() accepts what cannot work: {changes}")

    def test_its_caches_are_as_large_as_the_engine_counts(self) -> None:
        """`attention.layout`: in any layout a cache has one element for each slot, KV head and element of a head."""
        for shape in self._claimed_shapes():
            spec = self._spec(shape)
            rig = self._rig(shape, num_blocks=1)
            for num_blocks in (1, 2, 37):
                checked_layout(rig.backend, spec, num_blocks)

    # ---- The numbers ----------------------------------------------------------------------------------------------

    def test_every_claimed_size_is_right(self) -> None:
        """`attention.sizes`: each data type, head size, group size and block size gives the reference's numbers."""
        heads = self._heads()
        for turn in range(max(len(heads), len(self.group_sizes), len(self.block_sizes), len(self.dtypes))):
            block = self.block_sizes[turn % len(self.block_sizes)]
            shape = self._first_shape(
                [(1, block + 3), (5, 5), (3, 2 * block + 2), (1, 1)],
                dtype=self.dtypes[turn % len(self.dtypes)],
                head_dim=heads[turn % len(heads)][0],
                v_head_dim=heads[turn % len(heads)][1],
                group_size=self.group_sizes[turn % len(self.group_sizes)],
                block_size=block,
                seed=turn,
            )
            self._check("attention.sizes", shape)

    def test_any_step_equals_float64(self) -> None:
        """`attention.reference`: any mix of decoding sequences and pieces of prompts gives attention in float64."""
        self.for_all(lambda shape: self._check("attention.reference", shape), self._shapes())

    def test_few_and_many_sequences(self) -> None:
        """`attention.batch_sizes`: one sequence, many, one token, no past at all: the numbers are the reference's."""
        for lengths in (
            [(1, 1)],
            [(1, self.longest_context)],
            [(self.longest_query, self.longest_query)],
            [(1, 1)] * 9,
            [(1, 1 + 7 * row % self.longest_context) for row in range(33)],
            [(2, 2 + row) for row in range(9)],
            [(1, 1), (self.longest_query, self.longest_query)],
        ):
            self._check("attention.batch_sizes", self._first_shape(lengths, block_size=self._middle_block()))

    def test_a_sequence_does_not_depend_on_its_batch_mates(self) -> None:
        """`attention.batch_mates`: alone a sequence gets what it gets in a batch; with `same_bits` bit by bit."""

        def check(shape: StepShape, features: Features) -> None:
            shape = dataclasses.replace(shape, dtype="float32") if self.same_bits else shape
            features = self._usable(shape, features)
            rig, case = self._filled(shape, features)
            with self._judged("attention.batch_mates", shape, features):
                together = rig.check("attention.batch_mates", case, what="in a batch").out.clone()
            first = 0
            for index, (count, _) in enumerate(shape.lengths):
                with self._judged("attention.batch_mates", shape, features):
                    found = rig.check("attention.batch_mates", alone(case, index, tail=(0,)), what="alone")
                same = torch.equal(found.out, together[first : first + count])
                what = f"sequence {index} has other bits alone than in a batch: {shape}, {features}"
                expect(same or not self.same_bits, "attention.batch_mates", what)
                first += count

        self.for_all(check, self._shapes(), st.one_of(st.just(PLAIN), self._features()))

    def test_a_prompt_in_pieces_equals_the_whole(self) -> None:
        """`attention.chunks`: a prompt in pieces, and what is decoded after it, equals the whole, beside a mate."""

        def check(shape: StepShape, pieces: Sequence[int]) -> None:
            total = sum(pieces) + 3
            shape = dataclasses.replace(shape, lengths=[(total, total), (len(pieces) + 9,) * 2])
            rig, world = self._world(shape)
            rig.fill(part_of(world, shape.block_size, [(1, 5, 6)]))
            start = 0
            for turn, count in enumerate((*pieces, 1, 1, 1)):
                step = [(0, start, start + count), (1, 5 + turn, 6 + turn)]
                case = part_of(world, shape.block_size, step)
                with self._judged("attention.chunks", shape):
                    rig.check("attention.chunks", case, what=f"pieces {pieces}")
                start += count

        pieces = st.lists(st.integers(1, max(1, self.longest_query // 2)), min_size=1, max_size=4)
        self.for_all(check, self._shapes(st.just([(1, 1)])), pieces)

    def test_a_window_hides_what_is_before_it(self) -> None:
        """`attention.window`: with a sliding window a token sees itself and the window - 1 tokens before it."""
        self._need(self.windows, "windows")

        def check(shape: StepShape, window: int) -> None:
            self._check("attention.window", shape, Features(window=window))

        self.for_all(check, self._shapes(), self._window_sizes())

    def test_a_soft_cap_bends_the_scores(self) -> None:
        """`attention.soft_cap`: with a soft cap each score becomes cap * tanh(score / cap), also beside a window."""
        self._need(self.soft_caps, "soft_caps")

        def check(shape: StepShape, cap: float, window: int) -> None:
            for features in (Features(soft_cap=cap), self._with_window(shape, Features(window, cap))):
                self._check("attention.soft_cap", shape, features)

        self.for_all(check, self._shapes(), st.sampled_from([0.5, 2.0, 30.0, 50.0]), self._window_sizes())

    def test_sinks_join_the_denominators(self) -> None:
        """`attention.sinks`: each head's sink is a score more in its denominator, with and without a window."""
        self._need(self.sinks, "sinks")

        def check(shape: StepShape, window: int) -> None:
            for features in (Features(sinks=True), self._with_window(shape, Features(window, sinks=True))):
                self._check("attention.sinks", shape, features)

        self.for_all(check, self._shapes(), self._window_sizes())

    def test_denominators_are_told(self) -> None:
        """`attention.lse`: with `has_lse` it writes natural logarithms of the denominators, sinks and all."""
        rig = self._rig(self._first_shape([(1, 1)]), num_blocks=1)
        if not rig.backend.has_lse:
            pytest.skip(f"{type(rig.backend).__name__}.has_lse is False")

        def check(shape: StepShape, features: Features) -> None:
            self._check("attention.lse", shape, self._usable(shape, features), with_lse=True)

        self.for_all(check, self._shapes(), self._features())

    def test_without_a_mask_every_token_sees_all(self) -> None:
        """`attention.not_causal`: a backend that accepts `causal=False` hides nothing; others refuse it."""
        shape = self._first_shape([(1, 9), (5, 5), (3, 20)])
        if reasons := self._supports(self._spec(shape, causal=False)):
            pytest.skip(f"refused: {'; '.join(reasons)}")
        case = shape.case(self._torch_device)
        rig = self._rig(shape, num_blocks=len(case.kv_cache[0]), causal=False)
        rig.fill(case)
        with self._judged("attention.not_causal", shape):
            rig.check("attention.not_causal", case)

    # ---- What a step reads and writes -----------------------------------------------------------------------------

    def test_one_plan_serves_layers_that_differ(self) -> None:
        """`attention.plan_shared`: layers with other windows, caps, sinks and scales take the same plan."""
        kinds = [PLAIN]
        for more in (*self._claimed_features(), Features(window=1), Features(window=17), Features(5, 30.0), PLAIN):
            is_claimed = (self.windows or more.window is None) and (self.soft_caps or more.soft_cap is None)
            kinds += [more] if is_claimed else []

        def check(shape: StepShape) -> None:
            accepted = [PLAIN]
            for more in kinds:
                accepted += [] if self._supports(self._spec(shape, *accepted, more)) else [more]
            rig, case = self._filled(shape, *accepted)
            plan = rig.plan(case.batch)
            for layer in (*range(len(accepted)), 0):
                with self._judged("attention.plan_shared", shape, *accepted):
                    rig.check("attention.plan_shared", case, layer, plan, what=f"layer {layer} of {len(accepted)}")

        self.for_all(check, self._shapes())

    def test_plans_of_one_step_are_held_together(self) -> None:
        """`attention.plans_together`: several plans are made before the first forward, which then take turns."""

        def check(shape: StepShape, others: Sequence[tuple[int, int]], same_lengths: bool) -> None:
            lengths = shape.lengths if same_lengths else others
            shapes = (shape, dataclasses.replace(shape, lengths=lengths, seed=shape.seed + 1))  # in other blocks
            cases = [each.case(self._torch_device) for each in shapes]
            rig = self._rig(shape, *[PLAIN] * 3, num_blocks=max(len(case.kv_cache[0]) for case in cases))
            rig.layers = [dataclasses.replace(layer, group=layer.index % 2) for layer in rig.layers]
            for group, case in enumerate(cases):
                rig.fill(case, range(group, 3, 2))
            plans = [rig.plan(case.batch) for case in cases]
            for layer in rig.layers:
                case, plan = cases[layer.group], plans[layer.group]
                with self._judged("attention.plans_together", shapes[layer.group]):
                    rig.check("attention.plans_together", case, layer.index, plan, what=f"group {layer.group}")

        self.for_all(check, self._shapes(), self._lengths(), st.booleans())

    def test_a_prefix_is_read_in_the_step_that_writes_it(self) -> None:
        """`attention.writes_first`: one sequence reads blocks that another one fills in the same step."""

        def check(shape: StepShape, num_shared: int, more: int, readers_first: bool) -> None:
            prefix = num_shared * shape.block_size
            shape = dataclasses.replace(shape, lengths=[(prefix + more, prefix + more), (more, prefix + more)])
            case = sharing(shape.case(self._torch_device), shape.block_size, num_shared, readers_first=readers_first)
            rig = self._rig(shape, num_blocks=len(case.kv_cache[0]))
            with self._judged("attention.writes_first", shape):
                rig.check("attention.writes_first", case, what=f"{prefix} tokens are shared")

        self.for_all(check, self._shapes(st.just([(1, 1)])), st.integers(1, 2), st.integers(1, 9), st.booleans())

    def test_what_was_never_written_does_not_matter(self) -> None:
        """`attention.unwritten_slots`: NaN and huge numbers in slots and blocks of nobody never reach the output."""

        def check(shape: StepShape, features: Features, is_nan: bool) -> None:
            poison = torch.nan if is_nan else torch.finfo(shape.torch_dtype).max / 2
            features = self._usable(shape, features)
            self._check("attention.unwritten_slots", shape, features, poison=poison, what=f"the cache was {poison}")

        self.for_all(check, self._shapes(), self._features(), st.booleans())

    def test_tails_of_tables_do_not_matter(self) -> None:
        """`attention.table_tails`: behind a sequence's blocks its row of the block table may hold any number."""

        def check(shape: StepShape, features: Features) -> None:
            self._check("attention.table_tails", shape, self._usable(shape, features), tail=NO_BLOCKS)

        self.for_all(check, self._shapes(), self._features())

    def test_blocks_that_left_the_window_do_not_matter(self) -> None:
        """`attention.left_window`: once no layer sees a block its table entry is 0, and block 0 may hold NaN."""
        self._need(self.windows, "windows")

        def check(shape: StepShape, window: int) -> None:
            rig, case = self._filled(shape, Features(window=window), poison=torch.nan)
            with self._judged("attention.left_window", shape, Features(window=window)):
                rig.check("attention.left_window", passed(case, shape.block_size, window))

        self.for_all(check, self._shapes(), self._window_sizes())

    def test_other_slots_stay_as_they_are(self) -> None:
        """`attention.other_slots`: a step changes the slots of its own tokens, and nothing else in the caches."""

        def check(shape: StepShape, count: int) -> None:
            shape = dataclasses.replace(shape, lengths=[(count + 2, count + 2), (9, 9), (20, 20)])
            rig, world = self._world(shape)
            rig.fill(part_of(world, shape.block_size, [(1, 8, 9), (2, 19, 20)]))
            for low, high in ((0, count), (count, count + 1), (count + 1, count + 2)):
                case = part_of(world, shape.block_size, [(0, low, high)])
                before = [cache.clone() for cache in rig.caches[0]]
                with self._judged("attention.other_slots", shape):
                    rig.check("attention.other_slots", case)
                check_changed(rig, before, case)
            with self._judged("attention.other_slots", shape):
                rig.check("attention.other_slots", part_of(world, shape.block_size, [(2, 19, 20), (1, 8, 9)]))

        self.for_all(check, self._shapes(st.just([(1, 1)])), st.integers(1, self.longest_query))

    def test_offsets_need_more_than_32_bits(self, tmp_path: Path) -> None:
        """`attention.wide_offsets`: blocks that lie more than 2^31 elements into a cache are read and written."""
        dtype = min(self.dtypes, key=lambda name: 4 if name == "float32" else 2)
        shape = self._first_shape([(1, 40), (5, 20), (1, 7)], dtype=dtype, block_size=max(self.block_sizes))
        case = shape.case(self._torch_device)
        elements = shape.block_size * shape.num_kv_heads * min(shape.head_dim, shape.v_head_dim)
        num_blocks = _FAR // elements + len(case.kv_cache[0]) + 1
        shift = num_blocks - len(case.kv_cache[0])
        tables = tables_of(case.batch, shape.block_size)
        tables = [[block + shift * (index != 1) for block in blocks] for index, blocks in enumerate(tables)]

        def sparse(size: tuple[int, ...]) -> torch.Tensor:
            try:
                return sparse_zeros(size, shape.torch_dtype, self._torch_device, tmp_path)
            except (OSError, RuntimeError) as error:
                pytest.skip(f"no memory for a cache of {size}: {error}")

        rig = self._rig(shape, num_blocks=num_blocks, make_cache=sparse)
        moved = with_tables(case, tables, shape.block_size)
        rig.fill(moved)
        with self._judged("attention.wide_offsets", shape):
            rig.check("attention.wide_offsets", moved, what=f"blocks {tables}")

    def test_rows_may_be_views_of_a_fused_projection(self) -> None:
        """`attention.strided_rows`: rows of query, key and value may lie apart, with others' between them."""

        def check(shape: StepShape, features: Features) -> None:
            self._check("attention.strided_rows", shape, self._usable(shape, features), fused=True)

        self.for_all(check, self._shapes(), self._features())

    def test_it_writes_its_output_whole_and_nothing_beside_it(self) -> None:
        """`attention.out_whole`: every element of `out` and `lse` is written, and no memory beside them."""
        self._check_each_feature()

    def test_it_changes_nothing_that_it_is_given(self) -> None:
        """`attention.inputs_unchanged`: plans and forwards leave query, key, value and the step's metadata alone."""
        self._check_each_feature(fused=True)

    # ---- CUDA graphs ----------------------------------------------------------------------------------------------

    def test_a_recorded_step_is_replayed_with_new_contents(self) -> None:
        """`attention.capture`: what a backend that says `can_capture` has recorded serves other lengths and blocks."""
        kinds = [features for features in self._claimed_features() if not features.sinks]
        rig = self._rig(self._first_shape([(1, 1)]), num_blocks=1)
        if not rig.backend.can_capture:
            pytest.skip(f"{type(rig.backend).__name__}.can_capture is False")

        def check(shape: StepShape, at: Sequence[int]) -> None:
            shape = dataclasses.replace(shape, lengths=[(self.longest_context,) * 2] * 3)
            accepted = [PLAIN] if self._supports(self._spec(shape, *kinds)) else kinds
            rig, world = self._world(shape, *accepted)
            width = len(tables_of(world.batch, shape.block_size)[0]) + 5
            recorded = RecordedStep(rig, world, num_rows=4, width=width)
            for turn, live in enumerate((3, 2, 3, 1)):
                spans = [(index, at[index] + turn, at[index] + turn + 1) for index in range(live)]
                case = part_of(world, shape.block_size, spans)
                rig.fill(case)
                plain = dataclasses.replace(shape, lengths=[(1, high) for _, _, high in spans])
                with self._judged("attention.capture", plain, *accepted):
                    for layer, found in zip(rig.layers, recorded.replay(case), strict=True):
                        compare("attention.capture", found, case, layer, what=f"replay {turn} of {shape}")

        places = st.tuples(*[st.integers(0, self.longest_context - 5)] * 3)
        self.for_all(check, self._shapes(st.just([(1, 1)])), places)
