#include "tiles.cuh"

UNSLOTH_LINEAR_BLOCKS_TILES(tiles_q5_0, kQ5_0)
UNSLOTH_LINEAR_BLOCKS_TILES(tiles_q5_1, kQ5_1)
