//! Who computes a product: what was the fastest for the measured weights that are the most like it.

use std::fmt;

use crate::dtype::DType;

/// Who computes a product of `x` and weights of one dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Server {
    /// The kernels of this library for few rows.
    Own,
    /// cuBLASLt, with the algorithm that it names first of those without a workspace.
    Library,
    /// cuBLASLt, with its first algorithm of this cluster shape (`CUBLASLT_CLUSTER_SHAPE_*`), if it
    /// names one.
    Cluster(u16),
    /// cuBLASLt, with the algorithm that it names first of all.
    Workspace,
}

/// The fastest up to so many rows. The last of a list serves any number of rows.
pub(super) type Upto = (usize, Server);

/// What was measured of weights `[columns, in_features]`.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Shape {
    pub columns: usize,
    pub in_features: usize,
    /// Without a workspace.
    pub alone: &'static [Upto],
    /// With one.
    pub with: &'static [Upto],
}

/// Rows up to which kernels of this library are the faster ones, for columns and input features in
/// these ranges, ends included.
pub(super) type FewRows = (usize, (usize, usize), (usize, usize));

/// What the choice of a [`Server`] follows from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) enum Why {
    /// It was the fastest up to so many rows of these weights, of all that were measured the most
    /// like the product's.
    Measured {
        columns: usize,
        in_features: usize,
        rows: usize,
    },
    /// The sizes are in the table of products of f32 for few rows, or not.
    F32 { few: bool },
    /// Nothing was measured.
    Unmeasured,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Measured {
                columns,
                in_features,
                rows,
            } => {
                write!(f, "the fastest for ")?;
                match rows {
                    &usize::MAX => write!(f, "more rows")?,
                    rows => write!(f, "up to {rows} rows")?,
                }
                write!(f, " where weights [{columns}, {in_features}] were measured")
            }
            Why::F32 { few: true } => write!(f, "few rows of f32"),
            Why::F32 { few: false } => write!(f, "many rows of f32"),
            Why::Unmeasured => write!(f, "nothing was measured"),
        }
    }
}

/// Products.
#[derive(Clone, Copy, Debug)]
pub(in crate::cuda) struct Linear {
    /// Of f16 and bf16.
    pub halves: &'static [Shape],
    /// Of f32, without a workspace and with one.
    pub f32: [&'static [FewRows]; 2],
}

impl Linear {
    /// Who computes `rows` rows of a product with weights `[columns, in_features]`.
    pub fn server(
        &self,
        dtype: DType,
        rows: usize,
        columns: usize,
        in_features: usize,
        with_workspace: bool,
    ) -> Server {
        let sizes = (rows, columns, in_features);
        self.choose(dtype, sizes, with_workspace).0
    }

    /// [`Linear::server`], and why it.
    pub fn choose(
        &self,
        dtype: DType,
        (rows, columns, in_features): (usize, usize, usize),
        with_workspace: bool,
    ) -> (Server, Why) {
        if dtype == DType::F32 {
            let [alone, with] = self.f32;
            let few = if with_workspace { with } else { alone };
            let within =
                |size: usize, (least, most): (usize, usize)| (least..=most).contains(&size);
            let own = few.iter().any(|(most, of_columns, of_in_features)| {
                rows <= *most
                    && within(columns, *of_columns)
                    && within(in_features, *of_in_features)
            });
            let server = match (own, with_workspace) {
                (true, _) => Server::Own,
                (false, true) => Server::Workspace,
                (false, false) => Server::Library,
            };
            return (server, Why::F32 { few: own });
        }
        let (columns, in_features) = (log2(columns), log2(in_features));
        let distance = |s: &&Shape| {
            log2(s.columns).abs_diff(columns) + log2(s.in_features).abs_diff(in_features)
        };
        let Some(nearest) = self.halves.iter().min_by_key(distance) else {
            return (Server::Library, Why::Unmeasured);
        };
        let all = match with_workspace {
            true => nearest.with,
            false => nearest.alone,
        };
        let serves = all.iter().find(|(most, _)| rows <= *most);
        let Some((rows, server)) = serves else {
            return (Server::Library, Why::Unmeasured);
        };
        let why = Why::Measured {
            columns: nearest.columns,
            in_features: nearest.in_features,
            rows: *rows,
        };
        (*server, why)
    }
}

/// The logarithm of a size in sixteenths, straight between powers of two.
fn log2(size: usize) -> usize {
    let size = size.clamp(1, 1 << 48);
    let whole = size.ilog2() as usize;
    16 * whole + ((16 * (size - (1 << whole))) >> whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_grow() {
        assert_eq!(log2(0), 0);
        assert_eq!(log2(2), 16);
        assert_eq!(log2(3), 24);
        assert_eq!(log2(1 << 12), 192);
        assert!((1..100_000).all(|size| log2(size) <= log2(size + 1)));
        assert_eq!(log2(usize::MAX), 48 * 16);
    }

    #[test]
    fn the_nearest_shape_answers() {
        const FAR: Shape = Shape {
            columns: 1024,
            in_features: 4096,
            alone: &[(8, Server::Own), (usize::MAX, Server::Library)],
            with: &[(4, Server::Own), (usize::MAX, Server::Workspace)],
        };
        const NEAR: Shape = Shape {
            columns: 4096,
            alone: &[(16, Server::Own), (usize::MAX, Server::Library)],
            ..FAR
        };
        let linear = Linear {
            halves: &[FAR, NEAR],
            f32: [&[], &[(16, (0, usize::MAX), (0, 2048))]],
        };
        let server = |dtype, rows, columns, with| linear.server(dtype, rows, columns, 4000, with);
        assert_eq!(server(DType::F16, 16, 5000, false), Server::Own);
        assert_eq!(server(DType::F16, 17, 5000, false), Server::Library);
        assert_eq!(server(DType::Bf16, 9, 1100, false), Server::Library);
        assert_eq!(server(DType::Bf16, 8, 1100, true), Server::Workspace);
        assert_eq!(server(DType::F32, 1, 1100, true), Server::Workspace);
        assert_eq!(server(DType::F32, 1, 1100, false), Server::Library);
        let short = linear.server(DType::F32, 16, 1100, 2048, true);
        assert_eq!(short, Server::Own);
        for (dtype, rows, told) in [
            (
                DType::F16,
                16,
                "the fastest for up to 16 rows where weights [4096, 4096] were measured",
            ),
            (
                DType::F16,
                17,
                "the fastest for more rows where weights [4096, 4096] were measured",
            ),
            (DType::F32, 17, "many rows of f32"),
        ] {
            let (_, why) = linear.choose(dtype, (rows, 5000, 4000), false);
            assert_eq!(why.to_string(), told);
        }
    }
}
