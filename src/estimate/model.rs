//! Decoder-only transformers, and their parameters.

use arrayvec::ArrayVec;

use crate::error::{Result, text};

use super::{OP, positive, product, sum};

/// A transformer of the Llama family: RMSNorm before attention and before a gated MLP, rotary
/// positions, grouped-query attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Model {
    /// Entries of the vocabulary.
    pub vocab_size: u64,
    /// Components of the hidden state.
    pub hidden_size: u64,
    /// Components between the MLP's projections.
    pub intermediate_size: u64,
    /// Layers.
    pub num_layers: u64,
    /// Query heads per layer.
    pub num_heads: u64,
    /// Key and value heads per layer, a divisor of `num_heads`.
    pub num_kv_heads: u64,
    /// Components of a query or key head.
    pub head_dim: u64,
    /// Components of a value head.
    pub v_head_dim: u64,
    /// The output projection is the embedding.
    pub tied_embeddings: bool,
    /// The query, key and value projections have biases (Qwen 2).
    pub qkv_bias: bool,
    /// Attention's output projection has a bias.
    pub output_bias: bool,
    /// The MLP's three projections have biases.
    pub mlp_bias: bool,
    /// Query and key heads are normalised, with one gain vector for queries and one for keys per
    /// layer (Qwen 3).
    pub qk_norm: bool,
}

/// Parameters, by use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParameterCount {
    /// `vocab_size · hidden_size`.
    pub embedding: u64,
    /// Projections to queries, keys and values and of attention's output, with their biases, in all
    /// layers.
    pub attention: u64,
    /// Gate, up and down projections with their biases, in all layers.
    pub mlp: u64,
    /// Gains of all norms, the last one included.
    pub norms: u64,
    /// The output projection; 0 if it is the embedding.
    pub head: u64,
    /// The sum.
    pub total: u64,
}

/// Parameters of one shape.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tensor {
    pub elements: u64,
    /// How many there are.
    pub count: u64,
    /// Gains or a bias, not a matrix.
    pub is_vector: bool,
}

impl Model {
    /// Components of all query heads of a token.
    pub(super) fn q_size(&self) -> Result<u64> {
        product("num_heads", &[self.num_heads, self.head_dim])
    }

    /// Components of all key and value heads of a token.
    pub(super) fn kv_size(&self) -> Result<u64> {
        let head = sum("head_dim", &[self.head_dim, self.v_head_dim])?;
        product("num_kv_heads", &[self.num_kv_heads, head])
    }

    /// Components of the values that attention gives for a token.
    pub(super) fn attended_size(&self) -> Result<u64> {
        product("num_heads", &[self.num_heads, self.v_head_dim])
    }

    /// Counts the parameters.
    ///
    /// # Errors
    /// As [`Model::validate`], or the count overflows 64 bits.
    pub fn parameters(&self) -> Result<ParameterCount> {
        self.validate()?;
        let when = |condition: bool, n: u64| if condition { n } else { 0 };
        let (h, i, layers) = (self.hidden_size, self.intermediate_size, self.num_layers);
        let qkv = sum("attention", &[self.q_size()?, self.kv_size()?])?;
        let attended = self.attended_size()?;
        let attention = sum(
            "attention",
            &[
                product("attention", &[qkv, h])?,
                product("attention", &[attended, h])?,
                when(self.qkv_bias, qkv),
                when(self.output_bias, h),
            ],
        )?;
        let mlp = sum(
            "mlp",
            &[
                product("mlp", &[3, h, i])?,
                when(self.mlp_bias, sum("mlp", &[i, i, h])?),
            ],
        )?;
        let qk_norm = when(self.qk_norm, product("norms", &[2, self.head_dim])?);
        let layer_norms = sum("norms", &[h, h, qk_norm])?;
        let norms = product("norms", &[layers, layer_norms])?;
        let mut count = ParameterCount {
            embedding: product("embedding", &[self.vocab_size, h])?,
            attention: product("attention", &[layers, attention])?,
            mlp: product("mlp", &[layers, mlp])?,
            norms: sum("norms", &[norms, h])?,
            head: 0,
            total: 0,
        };
        count.head = when(!self.tied_embeddings, count.embedding);
        count.total = sum(
            "parameters",
            &[
                count.embedding,
                count.attention,
                count.mlp,
                count.norms,
                count.head,
            ],
        )?;
        Ok(count)
    }

    /// The parameters tensor by tensor, of a model whose [`Model::parameters`] are counted: how many
    /// elements each has, and of which there are how many.
    pub(super) fn tensors(&self) -> Result<ArrayVec<Tensor, 14>> {
        let (h, i, layers) = (self.hidden_size, self.intermediate_size, self.num_layers);
        let qkv = sum("attention", &[self.q_size()?, self.kv_size()?])?;
        let table = product("embedding", &[self.vocab_size, h])?;
        let matrix = |present, elements, count| (present, elements, count, false);
        let vector = |present, elements, count| (present, elements, count, true);
        let all = [
            matrix(true, table, 1),
            matrix(true, product("attention", &[qkv, h])?, layers),
            vector(self.qkv_bias, qkv, layers),
            vector(self.qk_norm, self.head_dim, 2 * layers),
            matrix(
                true,
                product("attention", &[self.attended_size()?, h])?,
                layers,
            ),
            vector(self.output_bias, h, layers),
            matrix(true, product("mlp", &[2, h, i])?, layers),
            vector(self.mlp_bias, product("mlp", &[2, i])?, layers),
            matrix(true, product("mlp", &[h, i])?, layers),
            vector(self.mlp_bias, h, layers),
            vector(true, h, 2 * layers + 1),
            matrix(!self.tied_embeddings, table, 1),
        ];
        let present = all.into_iter().filter(|(present, ..)| *present);
        Ok(present
            .map(|(_, elements, count, is_vector)| Tensor {
                elements,
                count,
                is_vector,
            })
            .collect())
    }

    /// Checks that sizes are not zero and heads fit their groups.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming the field.
    pub fn validate(&self) -> Result<()> {
        positive("vocab_size", self.vocab_size)?;
        positive("hidden_size", self.hidden_size)?;
        positive("intermediate_size", self.intermediate_size)?;
        positive("num_layers", self.num_layers)?;
        positive("num_heads", self.num_heads)?;
        positive("num_kv_heads", self.num_kv_heads)?;
        positive("head_dim", self.head_dim)?;
        positive("v_head_dim", self.v_head_dim)?;
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            let problem = text!(
                "is {}, which does not divide num_heads {}",
                self.num_kv_heads,
                self.num_heads
            );
            return Err(crate::Error::invalid(OP, "num_kv_heads", problem));
        }
        Ok(())
    }
}
