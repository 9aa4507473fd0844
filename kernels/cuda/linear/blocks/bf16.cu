#include "few_rows.cuh"

UNSLOTH_LINEAR_BLOCKS(bf16_q8_0, __nv_bfloat16, kQ8_0)
UNSLOTH_LINEAR_BLOCKS(bf16_q4_0, __nv_bfloat16, kQ4_0)
UNSLOTH_LINEAR_BLOCKS(bf16_q4_1, __nv_bfloat16, kQ4_1)
UNSLOTH_LINEAR_BLOCKS(bf16_q5_0, __nv_bfloat16, kQ5_0)
UNSLOTH_LINEAR_BLOCKS(bf16_q5_1, __nv_bfloat16, kQ5_1)
UNSLOTH_LINEAR_BLOCKS(bf16_q4_k, __nv_bfloat16, kQ4K)
UNSLOTH_LINEAR_BLOCKS(bf16_q5_k, __nv_bfloat16, kQ5K)
UNSLOTH_LINEAR_BLOCKS(bf16_q6_k, __nv_bfloat16, kQ6K)
UNSLOTH_LINEAR_BLOCKS(bf16_tq1_0, __nv_bfloat16, kTq1_0)
UNSLOTH_LINEAR_BLOCKS(bf16_tq2_0, __nv_bfloat16, kTq2_0)
UNSLOTH_LINEAR_BLOCKS(bf16_q2_0, __nv_bfloat16, kQ2_0)
