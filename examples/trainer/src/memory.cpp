#include "memory.h"

#include "optimizer.h"

namespace llm {
namespace {

// Of a rank of a pipeline, which the estimate does not know: it lacks the embedding, or what is
// behind the layers, and has more than one batch's activations at a time.
uint64_t of_stage(const Estimated &of, const unsloth_model_params &model,
                  unsloth_training_memory memory) {
  const ModelTensors &tensors = of.weights.tensors();
  const uint64_t table = of.config.vocab_size * of.config.hidden_size;
  const uint64_t here = element_count(tensors.embedding) + element_count(tensors.output);
  const uint64_t missing = (of.config.tied_embeddings ? 1 : 2) * table - here;
  memory.weights -= missing * element_size(of.args.weights);
  if (of.lora == nullptr) {
    memory.gradients -= missing * sizeof(float);
    auto count = unsloth::make<unsloth_parameter_count>();
    check(unsloth_model_parameters_count(&model, &count));
    const uint64_t elsewhere = missing + (of.weights.borrows_embedding() ? table : 0);
    const double share = 1.0 - static_cast<double>(elsewhere) / static_cast<double>(count.total);
    const auto cut = [share](uint64_t *bytes) {
      *bytes = static_cast<uint64_t>(share * static_cast<double>(*bytes));
    };
    cut(&memory.master_weights);
    cut(&memory.optimizer_state);
    // The first rank receives the gradient that the last one has of the table.
    if (of.config.tied_embeddings && of.pipeline->is_first()) {
      memory.gradients += table * sizeof(float);
    }
  }
  // The last norm's output is of one batch.
  const uint64_t states = of.batches.tokens() * of.config.hidden_size * element_size(of.args.dtype);
  memory.saved_activations = of.pipeline->num_slots() * (memory.saved_activations - states) +
                             (of.pipeline->is_last() ? states : 0);
  return memory.weights + memory.master_weights + memory.gradients + memory.optimizer_state +
         memory.saved_activations + memory.inputs + memory.activation_gradients +
         of.step.workspace_size();
}

// Of gradients of layers that are not f32. The estimate has all gradients in one dtype, and those
// of other weights are f32; products that do not add to f32 differ in their workspace.
void narrow_gradients(const Estimated &of, unsloth_training_memory *memory) {
  uint64_t less = 0;
  for (const LayerTensors &layer : of.weights.gradients().layers) {
    for (const unsloth_tensor &gradient : tensors_of(layer)) {
      less += element_count(gradient) * sizeof(float) - byte_count(gradient);
    }
  }
  memory->gradients -= less;
  memory->total -= less + memory->workspace;
  memory->workspace = of.step.workspace_size();
  memory->total += memory->workspace;
}

// Of ranks that share the optimizer. Their first batch's products do not add to f32.
void share_optimizer(const Estimated &of, unsloth_training_memory *memory) {
  const auto shares = static_cast<uint64_t>(of.shares);
  const auto cut = [&](uint64_t *bytes) {
    const uint64_t less = *bytes - *bytes / shares;
    *bytes -= less;
    memory->total -= less;
  };
  cut(&memory->master_weights);
  cut(&memory->optimizer_state);
  memory->total = memory->total - memory->workspace + of.step.workspace_size();
  memory->workspace = of.step.workspace_size();
}

}  // namespace

uint64_t estimate_memory(const Estimated &of) {
  auto model = unsloth::make<unsloth_model_params>();
  const LayerTensors &layer = of.weights.tensors().layers[0];
  model.tied_embeddings = of.config.tied_embeddings ? 1 : 0;
  model.qkv_bias = layer.qkv_bias.rank > 0 ? 1 : 0;
  model.output_bias = layer.output_bias.rank > 0 ? 1 : 0;
  model.vocab_size = static_cast<int64_t>(of.config.vocab_size);
  model.hidden_size = static_cast<int64_t>(of.config.hidden_size);
  model.intermediate_size = static_cast<int64_t>(of.config.intermediate_size);
  model.num_layers = static_cast<int64_t>(of.weights.tensors().layers.size());
  model.num_heads = static_cast<int64_t>(of.config.num_heads);
  model.num_kv_heads = static_cast<int64_t>(of.config.num_kv_heads);
  model.head_dim = static_cast<int64_t>(of.config.head_dim);
  auto params = unsloth::make<unsloth_training_memory_params>();
  params.ctx = of.context.get();
  params.dtype = of.args.dtype;
  params.weight_dtype = of.args.weights;
  params.vector_dtype = UNSLOTH_DTYPE_F32;
  params.gradient_dtype = UNSLOTH_DTYPE_F32;
  params.master_weights = Optimizer::master(of.args.dtype);
  params.optimizer = UNSLOTH_OPTIMIZER_ADAM;
  params.checkpointing = of.args.checkpointing;
  params.model = &model;
  params.batch_size = 1;
  const uint64_t tokens = of.batches.tokens() / static_cast<uint64_t>(of.text_parts);
  params.sequence_length = static_cast<int64_t>(tokens);
  params.packed_sequences = static_cast<int64_t>(of.batches.max_sequences());
  params.micro_batches = static_cast<int64_t>(of.num_batches);
  if (of.lora) {
    uint64_t parameters = 0;
    for (const Parameter &parameter : of.lora->parameters()) {
      parameters += element_count(parameter.weight);
    }
    params.adapter_dtype = UNSLOTH_DTYPE_F32;
    params.adapter_parameters = static_cast<int64_t>(parameters);
    params.adapted_parameters = static_cast<int64_t>(of.lora->merged_parameters());
  }
  auto memory = unsloth::make<unsloth_training_memory>();
  check(unsloth_training_memory_estimate(&params, &memory));
  if (of.args.gradients != UNSLOTH_DTYPE_F32) narrow_gradients(of, &memory);
  if (of.shares > 1) share_optimizer(of, &memory);
  if (of.pipeline != nullptr) return of_stage(of, model, memory);
  if (of.text_parts == 1) return memory.total;
  // It does not know what a layer in parts keeps, beside hidden states and the last norm's output.
  const uint64_t states = tokens * of.config.hidden_size * element_size(of.args.dtype);
  const uint64_t saved = (of.config.num_layers + 2) * states + of.step.saved_size();
  return memory.total - memory.saved_activations + saved - memory.workspace +
         of.step.workspace_size();
}

}  // namespace llm
