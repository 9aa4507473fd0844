//! Embedding.

use unsloth::ops::embedding;
use unsloth::{DType, Stream};

use super::{Leaf, assert_gradients, gradients};
use crate::common::workspace::poisoned_workspace;
use crate::common::{TestTensor, contexts, contiguous, rng};
use crate::{candle, normal};

#[test]
fn embedding() {
    // More tokens than rows, so that some are looked up several times.
    let (tokens, vocab, dim) = (50, 20, 48);
    for ctx in contexts() {
        let table = Leaf::normal(&ctx, &[vocab, dim]);
        let ids = TestTensor::integers(&mut rng(), DType::I32, contiguous(&[tokens]), vocab as i64);
        let dout = normal(DType::F32, &[tokens, dim]);
        let (ours, of_tokens) = (dout.upload(&ctx), ids.upload(&ctx));
        let mut dtable = table.gradient(&ctx);
        let mut params = embedding::backward::Params {
            vocabulary: None,
            dout: ours.view(),
            ids: of_tokens.view(),
            dweight: dtable.view_mut(),
            padding_idx: None,
            accumulate: false,
            workspace: unsloth::Workspace::none(),
        };
        let size = embedding::backward::workspace_size(&ctx, &params).unwrap();
        let mut workspace = poisoned_workspace(&ctx, size);
        params.workspace = workspace.workspace();
        embedding::backward(&ctx, &params, Stream::DEFAULT).unwrap();

        let ids = candle(&ids).to_dtype(candle_core::DType::U32).unwrap();
        let theirs = gradients(&[(table.theirs.index_select(&ids, 0), &dout)]);
        assert_gradients("embedding", &[("table", &table, &dtable)], &theirs, 4.0);
    }
}
