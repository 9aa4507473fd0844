// A pipeline's schedules, executed by ranks that count: every pass finds what it needs, transfers
// meet, and the simulation says what formulas do.
#include "check.h"

enum { STAGES = 4, MICRO_BATCHES = 8, CHUNKS = 2, MAX_ACTIONS = 128 };

static unsloth_pipeline_action actions[STAGES][MAX_ACTIONS];
static int64_t numbers[STAGES];

static void read(unsloth_pipeline_kind kind) {
  unsloth_pipeline_schedule_params p = UNSLOTH_PIPELINE_SCHEDULE_PARAMS_INIT;
  p.kind = kind;
  p.stages = STAGES;
  p.micro_batches = MICRO_BATCHES;
  p.chunks = kind == UNSLOTH_PIPELINE_INTERLEAVED ? CHUNKS : 0;
  for (p.rank = 0; p.rank < STAGES; p.rank++) {
    unsloth_pipeline_summary summary = UNSLOTH_PIPELINE_SUMMARY_INIT;
    CHECK_OK(unsloth_pipeline_schedule(&p, &summary, NULL, 0));
    CHECK(summary.num_actions > 0 && summary.num_actions <= MAX_ACTIONS);
    CHECK_OK(unsloth_pipeline_schedule(&p, &summary, actions[p.rank], MAX_ACTIONS));
    numbers[p.rank] = summary.num_actions;
    for (int64_t i = 0; i < summary.num_actions; i++) {
      CHECK(actions[p.rank][i].slot < summary.num_slots && actions[p.rank][i].joined <= 1);
    }
  }
}

static int is_send(unsloth_pipeline_step step) {
  return step == UNSLOTH_PIPELINE_STEP_SEND_ACTIVATION ||
         step == UNSLOTH_PIPELINE_STEP_SEND_GRADIENT;
}

// Runs the passes of all ranks, each transfer where both sides have come to it; gives how many
// there were.
static int run(void) {
  int64_t at[STAGES] = {0};
  int passes = 0;
  for (int moved = 1; moved;) {
    moved = 0;
    for (int rank = 0; rank < STAGES; rank++) {
      if (at[rank] == numbers[rank]) continue;
      const unsloth_pipeline_action own = actions[rank][at[rank]];
      if (own.peer < 0) {
        passes++;
      } else {
        if (at[own.peer] == numbers[own.peer]) continue;
        const unsloth_pipeline_action other = actions[own.peer][at[own.peer]];
        if (other.peer != rank || is_send(own.step) == is_send(other.step)) continue;
        CHECK(own.micro_batch == other.micro_batch);
        at[own.peer]++;
      }
      at[rank]++;
      moved = 1;
    }
  }
  for (int rank = 0; rank < STAGES; rank++) CHECK(at[rank] == numbers[rank]);
  return passes;
}

int main(void) {
  read(UNSLOTH_PIPELINE_ONE_F_ONE_B);
  CHECK(actions[3][0].step == UNSLOTH_PIPELINE_STEP_RECEIVE_ACTIVATION && actions[3][0].peer == 2);
  CHECK(actions[3][1].step == UNSLOTH_PIPELINE_STEP_FORWARD && actions[3][1].peer == -1);
  CHECK(actions[3][2].step == UNSLOTH_PIPELINE_STEP_BACKWARD);
  CHECK(run() == STAGES * MICRO_BATCHES * 2);
  read(UNSLOTH_PIPELINE_GPIPE);
  CHECK(run() == STAGES * MICRO_BATCHES * 2);
  read(UNSLOTH_PIPELINE_INTERLEAVED);
  CHECK(run() == STAGES * MICRO_BATCHES * 2 * CHUNKS);
  read(UNSLOTH_PIPELINE_ZERO_BUBBLE);
  CHECK(run() == STAGES * MICRO_BATCHES * 3);

  unsloth_pipeline_simulate_params p = UNSLOTH_PIPELINE_SIMULATE_PARAMS_INIT;
  unsloth_pipeline_simulation found = UNSLOTH_PIPELINE_SIMULATION_INIT;
  unsloth_pipeline_rank_use ranks[STAGES];
  p.stages = STAGES;
  p.micro_batches = MICRO_BATCHES;
  p.forward = p.backward_input = p.backward_weight = 1;
  p.activation_bytes = 100;
  p.split_bytes = 10;
  CHECK_OK(unsloth_pipeline_simulate(&p, &found, ranks, STAGES));
  CHECK(found.time == 33 && found.idle == 3.0 / 11 && found.peak_live == 4);
  CHECK(found.peak_bytes == 400 && ranks[3].peak_bytes == 100 && ranks[3].busy == 24);
  p.kind = UNSLOTH_PIPELINE_ZERO_BUBBLE;
  CHECK_OK(unsloth_pipeline_simulate(&p, &found, ranks, STAGES));
  CHECK(found.time == 27 && found.peak_live == 4 && ranks[3].peak_bytes == 130);
  p.kind = UNSLOTH_PIPELINE_INTERLEAVED;
  p.chunks = CHUNKS;
  p.overlap = 1;
  CHECK_OK(unsloth_pipeline_simulate(&p, &found, NULL, 0));
  CHECK(found.time == 28.5 && found.peak_bytes == 550);

  p.micro_batches = 9;
  CHECK_FAILS(
      unsloth_pipeline_simulate(&p, &found, NULL, 0), UNSLOTH_STATUS_INVALID_ARGUMENT,
      "pipeline_simulate: micro_batches is 9, a multiple of stages 4 is needed interleaved");
  CHECK(found.time == 28.5);
  return 0;
}
