//! How products by tiles are parted: a rule from times on an H100 and an H200
//! (`kernels/cuda/linear/wide/LADDER.md`).

use crate::cuda::tuning::rules::products::E4M3_ROWS;
use crate::dtype::DType;
use crate::tensor::Workspace;

/// What a weight is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Of {
    Blocks,
    E4m3,
    /// Codes of 8 bits, by an `x` of codes.
    I8,
    /// Codes of 2 bits, likewise.
    Ternary,
}

impl Of {
    pub fn new(weight: DType) -> Of {
        match weight {
            DType::F8E4M3 => Of::E4m3,
            DType::I8 => Of::I8,
            DType::Ternary => Of::Ternary,
            _ => Of::Blocks,
        }
    }

    pub fn is_of_codes(self) -> bool {
        matches!(self, Of::I8 | Of::Ternary)
    }
}

/// What a form depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Sizes {
    pub rows: usize,
    pub out_features: usize,
    pub in_features: usize,
    pub multiprocessors: usize,
    /// Whether blocks have clusters.
    pub clusters: bool,
    pub of: Of,
    /// Of `x`, by blocks: fewer are faster by other kernels, or are to be more exact.
    pub least_rows: usize,
    /// Of `x`, by blocks or 8-bit floats: for more it is faster to decode the weight first and multiply by the result.
    pub most_rows: usize,
    /// Bytes of workspace, of which blocks with even shares have use.
    pub scratch: usize,
}

/// How a product is parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    /// Of `x`, of a tile.
    pub rows: usize,
    /// Of a multiprocessor, at most.
    pub blocks: usize,
    /// Blocks of a cluster, which part rows of the weight.
    pub parts: usize,
    /// Blocks that have even shares of the steps of all tiles; 0: tiles are whole, or a cluster's.
    pub shares: usize,
}

/// Some of a product's rows, and how they are parted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub sizes: Sizes,
    pub form: Form,
}

impl Sizes {
    /// Rows of the weight of a tile.
    const COLUMNS: usize = 128;
    /// Weights of a row that the costs below are of.
    const STEP: usize = 256;
    /// Elements of `x` up to which blocks have even shares of tiles of 256 rows. Such blocks are at different steps at a
    /// time, and read all of `x` together: of more the second cache holds only a part, and whole tiles are faster.
    const MOST_OF_SHARES: usize = 16 << 20;

    pub fn tiles(&self, form: Form) -> usize {
        self.out_features.div_ceil(Self::COLUMNS) * self.rows.div_ceil(form.rows)
    }

    /// Whether blocks of a cluster may be more than two.
    fn is_of_few(&self, form: Form) -> bool {
        self.of != Of::E4m3 && form.rows <= 64
    }

    /// Multiprocessors that blocks of clusters can have. They are in groups, which clusters do not cross and larger ones
    /// do not fill.
    fn reached(&self, form: Form) -> usize {
        match form.parts {
            1 | 2 => self.multiprocessors,
            4 => self.multiprocessors * 7 / 8,
            _ => self.multiprocessors * 3 / 4,
        }
    }

    /// Whether each block has a multiprocessor of its own.
    pub fn is_alone(&self, form: Form) -> bool {
        form.blocks == 1 || form.shares != 0 || self.tiles(form) * form.parts <= self.reached(form)
    }

    /// Whether even shares are of use where `x` is of codes: of few rows, and of tiles of which a multiprocessor has
    /// two blocks.
    fn is_shared_by_codes(&self, form: Form) -> bool {
        self.rows <= 64 && form.blocks == 2
    }

    /// Blocks that the device has at once.
    pub fn at_once(&self, form: Form) -> usize {
        match self.is_alone(form) {
            true => self.reached(form).max(1),
            false => 2 * self.multiprocessors.max(1),
        }
    }

    /// Nanoseconds that a form takes: of each round of tiles its steps, and what comes before and behind
    /// them. Blocks without a cluster copy the first steps of a tile while they store the one before.
    pub fn cost(&self, form: Form) -> usize {
        if self.of.is_of_codes() {
            return self.cost_of_codes(form);
        }
        let blocks = self.tiles(form) * form.parts;
        // Clusters of four do not come all at once then.
        let crowded = form.parts == 4 && blocks > self.multiprocessors;
        if form.shares != 0 {
            let (of_step, of_tile, around) = match form.rows {
                32 => (900, 0, 6500),
                64 => (1100, 0, 7600),
                128 => (1750, 0, 8500),
                _ => (2800, 4500, 11000),
            };
            let steps = self.steps_of_all(form).div_ceil(form.shares);
            return steps * of_step + steps * of_tile / self.steps().max(1) + around;
        }
        let (of_step, around, before) = match (form.rows, self.is_alone(form), form.parts) {
            (64, _, 1) if self.of == Of::E4m3 => (1400, 2000, 2000),
            (64, _, _) if self.of == Of::E4m3 => (1400, 5500, 0),
            (128, _, 1) if self.of == Of::E4m3 => (2000, 2000, 2000),
            (128, _, _) if self.of == Of::E4m3 => (2000, 5500, 0),
            (32, true, 1) => (900, 3200, 0),
            (32, true, _) => (900, 4900, 0),
            (32, false, 8) => (2400, 8000, 0),
            (32, false, _) => (if crowded { 2700 } else { 1750 }, 4500, 0),
            (64, true, 1) => (1100, 4000, 0),
            (64, true, _) => (1100, 4900, 0),
            (64, false, 8) => (2700, 9600, 0),
            (64, false, _) => (if crowded { 3200 } else { 2000 }, 6000, 0),
            (128, _, 1) => (1650, 2700, 1500),
            (128, _, _) => (1600, 6200, 0),
            (_, _, 1) => (2750, 4500, 0),
            _ => (3100, 3700, 0),
        };
        let rounds = blocks.div_ceil(self.at_once(form));
        let steps = self.steps().div_ceil(form.parts);
        before + rounds * (steps * of_step + around)
    }

    /// The same of codes.
    fn cost_of_codes(&self, form: Form) -> usize {
        let i8 = self.of == Of::I8;
        let of_step = match (form.rows, self.is_alone(form)) {
            (256, _) => 1400,
            (128, _) => 760,
            (64, true) if i8 => 700,
            (64, true) => 490,
            (64, false) => 970,
            (16, _) => 270,
            (_, true) if i8 => 630,
            (_, true) => 400,
            (_, false) if i8 => 1300,
            (_, false) => 720,
        };
        if form.shares != 0 {
            let around = if form.rows == 32 { 7000 } else { 8400 };
            return self.steps_of_all(form).div_ceil(form.shares) * of_step + around;
        }
        let around = match form.parts {
            1 => 2200,
            2 => 4300,
            4 => 4800,
            _ => 7300,
        };
        // Clusters do not come all at once then.
        let crowded = form.parts > 1 && self.tiles(form) * form.parts > self.multiprocessors;
        let rounds = (self.tiles(form) * form.parts).div_ceil(self.at_once(form));
        let steps = self.steps().div_ceil(form.parts);
        rounds * (steps * of_step + around) * if crowded { 2 } else { 1 }
    }

    /// Of a row of the weight.
    fn steps(&self) -> usize {
        self.in_features.div_ceil(Self::STEP)
    }

    fn steps_of_all(&self, form: Form) -> usize {
        self.tiles(form).saturating_mul(self.steps())
    }

    /// Bytes of workspace for blocks with even shares: a word and a tile of each. What lies behind is aligned as they are.
    pub fn shares_bytes(form: Form) -> usize {
        let of_share = size_of::<u64>() + form.rows * Self::COLUMNS * size_of::<f32>();
        (form.shares * of_share).next_multiple_of(Workspace::ALIGNMENT)
    }

    /// As many even shares as there are multiprocessors, or of at least two steps.
    fn shared(&self, whole: Form) -> Form {
        let shares = self.multiprocessors.min(self.steps_of_all(whole) / 2);
        Form { shares, ..whole }
    }

    /// Nanoseconds that kernels of few rows by 8-bit floats take, which read the weight for each 32 of
    /// them.
    fn cost_of_few(&self) -> usize {
        let million = self.out_features * self.in_features / 1000;
        let of_pass = |rows: usize| match rows {
            0 => 0,
            1..=16 => million * 350 / 1000,
            _ => million * 540 / 1000,
        };
        self.rows / 32 * of_pass(32) + of_pass(self.rows % 32) + 1000
    }

    /// The fastest of forms of which each block has whole tiles.
    pub fn form_of_whole_tiles(&self, whole: impl Iterator<Item = Form>) -> Option<Form> {
        whole.min_by_key(|form| (self.cost(*form), form.rows))
    }

    /// The fastest of some forms, which are given as tiles that are whole, if it is faster than what else there is.
    pub fn form(&self, whole: impl Iterator<Item = Form>) -> Option<Form> {
        /// Which kernels count in 32 bits.
        const MOST_STEPS: usize = 1 << 30;
        let forms = whole.flat_map(|whole| {
            let parted = [1, 2, 4, 8].map(|parts| Form { parts, ..whole });
            parted.into_iter().chain([self.shared(whole)])
        });
        let fits = |form: &Form| match form.shares {
            // A block of 16 rows has most of a multiprocessor's registers. With more tiles of rows there would be such
            // a block on each, and the kernel that rounds the next call's rows could not start beside them.
            _ if form.rows < 32 && self.rows > form.rows => false,
            0 if form.parts == 1 => true,
            0 => {
                self.clusters
                    && (form.parts <= 2 || self.is_of_few(*form))
                    // Each block has at least so many steps.
                    && form.parts * if self.is_of_few(*form) { 2 } else { 1 } <= self.steps()
                    && self.tiles(*form) * form.parts <= self.at_once(*form)
            }
            _ => {
                self.of != Of::E4m3
                    && (!self.of.is_of_codes() || self.is_shared_by_codes(*form))
                    && self.steps_of_all(*form) <= MOST_STEPS
                    && (form.rows < 256
                        || self.rows.saturating_mul(self.in_features) <= Self::MOST_OF_SHARES)
                    && Self::shares_bytes(*form) <= self.scratch
            }
        };
        let form = forms
            .filter(fits)
            .min_by_key(|form| (self.cost(*form), form.rows))?;
        let fastest = match self.rows {
            _ if self.of.is_of_codes() => true,
            rows if rows > self.most_rows => false,
            rows if self.of == Of::Blocks => rows >= self.least_rows,
            rows if rows <= E4M3_ROWS => rows > 8 && self.cost(form) < self.cost_of_few(),
            _ => true,
        };
        fastest.then_some(form)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub fn sizes(of: Of, rows: usize, out_features: usize, in_features: usize) -> Sizes {
        Sizes {
            rows,
            out_features,
            in_features,
            multiprocessors: 132,
            clusters: true,
            of,
            least_rows: 9,
            most_rows: 4096,
            scratch: usize::MAX,
        }
    }

    /// Tiles of the kernels that there are.
    pub fn whole(sizes: Sizes) -> impl Iterator<Item = Form> {
        let rows: &[usize] = match sizes.of {
            Of::E4m3 => &[64, 128, 256],
            Of::Ternary => &[16, 32, 64, 128, 256],
            _ => &[32, 64, 128, 256],
        };
        rows.iter().map(move |rows| Form {
            rows: *rows,
            blocks: match (sizes.of, *rows) {
                (Of::E4m3, _) | (Of::I8, 64) | (_, 16 | 128..) => 1,
                _ => 2,
            },
            parts: 1,
            shares: 0,
        })
    }

    /// Rows of a tile, parts and shares.
    fn form(sizes: Sizes) -> Option<(usize, usize, usize)> {
        let form = sizes.form(whole(sizes));
        form.map(|form| (form.rows, form.parts, form.shares))
    }

    /// The fastest that were measured, of 8-bit floats.
    #[test]
    fn forms_are_those_that_were_fastest() {
        for (sizes, expected) in [
            ((8, 14336, 4096), None),
            ((16, 14336, 4096), None),
            ((16, 32768, 4096), None),
            ((32, 4096, 4096), None),
            ((32, 4096, 14336), None),
            ((32, 14336, 4096), Some((64, 1, 0))),
            ((600, 129, 16), Some((64, 1, 0))),
            ((64, 4096, 4096), Some((64, 2, 0))),
            ((64, 14336, 4096), Some((64, 1, 0))),
            ((64, 4096, 14336), Some((64, 2, 0))),
            ((128, 14336, 4096), Some((128, 1, 0))),
            ((128, 4096, 14336), Some((64, 2, 0))),
            ((256, 4096, 4096), Some((128, 2, 0))),
            ((256, 14336, 4096), Some((256, 1, 0))),
            ((512, 4096, 4096), Some((256, 2, 0))),
            ((512, 4096, 14336), Some((256, 2, 0))),
            ((1024, 4096, 4096), Some((256, 1, 0))),
            ((2048, 14336, 4096), Some((256, 1, 0))),
            ((4097, 14336, 4096), None),
        ] {
            let (rows, n, k) = sizes;
            assert_eq!(
                form(self::sizes(Of::E4m3, rows, n, k)),
                expected,
                "{sizes:?}"
            );
        }
    }

    /// The same of blocks.
    #[test]
    fn forms_of_blocks_are_those_that_were_fastest() {
        for (sizes, expected) in [
            ((8, 14336, 4096), None),
            ((16, 576, 576), Some((32, 1, 0))),
            ((32, 4096, 4096), Some((32, 1, 132))),
            ((32, 14336, 4096), Some((32, 1, 0))),
            ((32, 4096, 14336), Some((32, 1, 132))),
            ((64, 4096, 4096), Some((64, 1, 132))),
            ((64, 14336, 4096), Some((64, 1, 0))),
            ((64, 4096, 14336), Some((64, 1, 132))),
            ((128, 4096, 4096), Some((64, 2, 0))),
            ((128, 14336, 4096), Some((128, 1, 0))),
            ((128, 4096, 14336), Some((128, 1, 132))),
            ((256, 4096, 4096), Some((128, 2, 0))),
            ((256, 14336, 4096), Some((256, 1, 0))),
            ((256, 4096, 14336), Some((128, 2, 0))),
            ((512, 4096, 4096), Some((256, 2, 0))),
            ((512, 14336, 4096), Some((256, 1, 0))),
            ((512, 4096, 14336), Some((256, 2, 0))),
            ((512, 6144, 4096), Some((256, 1, 132))),
            ((1024, 14336, 4096), Some((256, 1, 132))),
            ((2048, 14336, 4096), Some((256, 1, 0))),
            ((1500, 4096, 14336), Some((128, 1, 0))),
            ((4097, 14336, 4096), None),
        ] {
            let (rows, n, k) = sizes;
            assert_eq!(
                form(self::sizes(Of::Blocks, rows, n, k)),
                expected,
                "{sizes:?}"
            );
        }
    }

    /// The same of codes.
    #[test]
    fn forms_of_codes_are_those_that_were_fastest() {
        for (of, sizes, expected) in [
            (Of::Ternary, (16, 13824, 2560), (16, 1, 0)),
            (Of::Ternary, (16, 28672, 8192), (16, 1, 0)),
            (Of::Ternary, (16, 2560, 6912), (16, 4, 0)),
            (Of::Ternary, (16, 2560, 2560), (16, 1, 0)),
            (Of::Ternary, (16, 4096, 4096), (16, 2, 0)),
            (Of::Ternary, (16, 4096, 14336), (16, 2, 0)),
            (Of::Ternary, (32, 13824, 2560), (32, 1, 0)),
            (Of::Ternary, (32, 2560, 2560), (32, 4, 0)),
            (Of::Ternary, (32, 4096, 4096), (32, 2, 0)),
            (Of::Ternary, (32, 4096, 14336), (32, 1, 132)),
            (Of::Ternary, (64, 13824, 2560), (64, 1, 0)),
            (Of::Ternary, (64, 2560, 6912), (64, 4, 0)),
            (Of::Ternary, (64, 4096, 14336), (64, 1, 132)),
            (Of::Ternary, (128, 13824, 2560), (128, 1, 0)),
            (Of::Ternary, (256, 4096, 14336), (128, 2, 0)),
            (Of::Ternary, (512, 14336, 4096), (256, 1, 0)),
            (Of::I8, (16, 13824, 2560), (32, 1, 0)),
            (Of::I8, (16, 4096, 14336), (32, 1, 132)),
            (Of::I8, (64, 4096, 14336), (32, 2, 0)),
            (Of::I8, (128, 2560, 6912), (64, 2, 0)),
            (Of::I8, (4096, 14336, 4096), (256, 1, 0)),
            (Of::I8, (4096, 2560, 6912), (128, 1, 0)),
            (Of::I8, (8192, 4096, 14336), (256, 1, 0)),
        ] {
            let (rows, n, k) = sizes;
            assert_eq!(
                form(self::sizes(of, rows, n, k)),
                Some(expected),
                "{of:?} {sizes:?}"
            );
        }
    }

    /// By a kernel of which a multiprocessor has one block.
    #[test]
    fn clusters_come_at_once() {
        let sizes = sizes(Of::Blocks, 64, 4096, 4096);
        let whole = Form {
            rows: 64,
            blocks: 1,
            parts: 1,
            shares: 0,
        };
        let form = sizes.form([whole].into_iter()).unwrap();
        assert_eq!((form.parts, form.shares), (1, 132));
        let without = Sizes {
            scratch: 0,
            ..sizes
        };
        assert_eq!(without.form([whole].into_iter()).unwrap().parts, 2);
    }

    /// Without a workspace blocks of clusters part rows of the weight.
    #[test]
    fn forms_need_no_workspace() {
        let without = Sizes {
            scratch: 0,
            ..sizes(Of::Blocks, 32, 4096, 14336)
        };
        assert_eq!(form(without), Some((32, 8, 0)));
    }
}
