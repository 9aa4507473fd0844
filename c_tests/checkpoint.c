// A plan for gradient checkpointing, executed by a stack of layers that add their number: every
// layer reads its own input, forward and backward, and no more memory is held than was said.
#include "check.h"

enum { NUM_LAYERS = 30, MAX_ACTIONS = 4 * NUM_LAYERS };

int main(void) {
  unsloth_checkpoint_plan_params p = UNSLOTH_CHECKPOINT_PLAN_PARAMS_INIT;
  p.num_layers = NUM_LAYERS;
  p.hidden_bytes = 10;
  p.saved_bytes = 40;
  unsloth_checkpoint_summary all = UNSLOTH_CHECKPOINT_SUMMARY_INIT;
  p.every = NUM_LAYERS;
  CHECK_OK(unsloth_checkpoint_plan(&p, &all, NULL, 0));
  CHECK(all.num_recomputed == 0 && all.num_actions == 2 * NUM_LAYERS);
  CHECK(all.peak_bytes == (NUM_LAYERS + 1) * 10 + NUM_LAYERS * 40);

  unsloth_checkpoint_summary summary = UNSLOTH_CHECKPOINT_SUMMARY_INIT;
  unsloth_checkpoint_action actions[MAX_ACTIONS];
  p.every = 0;
  CHECK_OK(unsloth_checkpoint_plan(&p, &summary, NULL, 0));
  CHECK(summary.peak_bytes < all.peak_bytes / 4 && summary.num_actions <= MAX_ACTIONS);
  CHECK_OK(unsloth_checkpoint_plan(&p, &summary, actions, MAX_ACTIONS));

  int hidden[2 * NUM_LAYERS + 1] = {0};  // the input of layer n is n
  int saved[NUM_LAYERS];
  int backward = NUM_LAYERS;
  for (int64_t i = 0; i < summary.num_actions; ++i) {
    const unsloth_checkpoint_action a = actions[i];
    CHECK(a.input < summary.num_hidden_slots && a.output < summary.num_hidden_slots);
    CHECK(a.saved < summary.num_saved_slots && a.reserved == 0);
    CHECK(hidden[a.input] == a.layer);
    switch (a.step) {
      case UNSLOTH_CHECKPOINT_STEP_FORWARD:
      case UNSLOTH_CHECKPOINT_STEP_RECOMPUTE:
        if (a.saved >= 0) saved[a.saved] = a.layer;
        hidden[a.output] = a.layer + 1;
        break;
      case UNSLOTH_CHECKPOINT_STEP_DROP:
        hidden[a.input] = -1;
        break;
      default:
        CHECK(a.step == UNSLOTH_CHECKPOINT_STEP_BACKWARD);
        CHECK(a.layer == --backward && saved[a.saved] == a.layer);
    }
    if (a.layer == NUM_LAYERS - 1 && backward == NUM_LAYERS) {
      CHECK(hidden[summary.output_slot] == NUM_LAYERS);
    }
  }
  CHECK(backward == 0);

  CHECK_FAILS(unsloth_checkpoint_plan(&p, &summary, actions, 3), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "checkpoint_plan: capacity is 3, the plan has 105 actions");
  p.num_layers = 0;
  CHECK_FAILS(unsloth_checkpoint_plan(&p, &summary, NULL, 0), UNSLOTH_STATUS_INVALID_ARGUMENT,
              "checkpoint_plan: num_layers is 0, allowed: 1 to 65536");
  return 0;
}
