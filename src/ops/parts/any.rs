//! What may be a part: the problems of the library's operations, and what ranks do together.

use crate::context::{Beside, Both, Collective, Context, Join, Planned};
use crate::error::Result;
use crate::problem::{
    Plan, accumulate, attention, attention_merge, cast, cross_entropy, embedding, kv_cache, linear,
    mlp, norm, qk_norm_rope, rms_norm, rope, swiglu,
};

/// Declares what a part may be.
macro_rules! problems {
    ($($kind:ident($problem:ty)),* $(,)?) => {
        // Problems lie where they are made; boxes would be allocated for every call.
        #[allow(clippy::large_enum_variant)]
        #[derive(Clone, Debug)]
        pub(super) enum AnyProblem<'t> {
            $($kind($problem),)*
            Collective(Collective<'t>),
            Both(Both<'t>),
            Beside(Beside<'t>),
            Join(Join<'t>),
        }

        #[allow(clippy::large_enum_variant)] // as above
        pub(super) enum AnyPlan<'t, 'a> {
            $($kind(<$problem as Planned>::Plan<'a>),)*
            Collective(<Collective<'t> as Planned>::Plan<'a>),
            Both(<Both<'t> as Planned>::Plan<'a>),
            Beside(<Beside<'t> as Planned>::Plan<'a>),
            Join(<Join<'t> as Planned>::Plan<'a>),
        }

        /// A problem that may be a part.
        pub(crate) trait IsPart {
            #[doc(hidden)]
            fn into_any<'t>(self) -> Any<'t>;
        }

        $(
            impl IsPart for $problem {
                fn into_any<'t>(self) -> Any<'t> {
                    Any(AnyProblem::$kind(self))
                }
            }
        )*

        impl<'t> AnyProblem<'t> {
            pub(super) fn plan(self, ctx: &Context) -> Result<AnyPlan<'t, '_>> {
                Ok(match self {
                    $(AnyProblem::$kind(problem) => AnyPlan::$kind(problem.plan(ctx)?),)*
                    AnyProblem::Collective(problem) => AnyPlan::Collective(problem.plan(ctx)?),
                    AnyProblem::Both(problem) => AnyPlan::Both(problem.plan(ctx)?),
                    AnyProblem::Beside(problem) => AnyPlan::Beside(problem.plan(ctx)?),
                    AnyProblem::Join(join) => AnyPlan::Join(join.plan(ctx)?),
                })
            }
        }

        impl AnyPlan<'_, '_> {
            pub(super) fn as_plan(&self) -> &dyn Plan {
                match self {
                    $(AnyPlan::$kind(plan) => plan,)*
                    AnyPlan::Collective(plan) => plan,
                    AnyPlan::Both(plan) => plan,
                    AnyPlan::Beside(plan) => plan,
                    AnyPlan::Join(plan) => plan,
                }
            }
        }
    };
}

problems!(
    Mlp(mlp::Problem),
    Linear(linear::Problem),
    LinearBackward(linear::Backward),
    Swiglu(swiglu::Problem),
    SwigluBackward(swiglu::Backward),
    RmsNorm(rms_norm::Problem),
    NormBackward(norm::Backward),
    Rope(rope::Problem),
    QkNormRope(qk_norm_rope::Problem),
    QkNormRopeBackward(qk_norm_rope::Backward),
    Append(kv_cache::Append),
    CrossEntropyPart(cross_entropy::Part),
    CrossEntropyWhole(cross_entropy::Whole),
    Embedding(embedding::Problem),
    EmbeddingBackward(embedding::Backward),
    Attention(attention::Problem),
    AttentionPair(attention::Pair),
    AttentionStep(attention::Step),
    AttentionBackward(attention::Backward),
    AttentionMerge(attention_merge::Problem),
    Cast(cast::Problem),
    Accumulate(accumulate::Problem),
);

/// One of the problems that may be parts.
pub(crate) struct Any<'t>(pub(super) AnyProblem<'t>);
