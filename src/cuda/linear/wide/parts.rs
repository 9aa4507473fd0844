//! The rows of a product in one launch, or in two that run side by side: whole tiles, and a rest that would leave most of
//! a last tile empty.

use super::form::{Form, Part, Sizes};

/// How rows are parted; none if other kernels are faster.
pub(super) type Choice = Option<(Part, Option<Part>)>;

/// Nanoseconds that a second launch takes beside its work.
const OF_TWO: usize = 4000;

impl Sizes {
    /// The rows in one part, or in two if that is faster; if they are faster by these kernels than by others. Forms are given
    /// as tiles that are whole.
    pub fn parts<I: Iterator<Item = Form>>(&self, whole: impl Fn() -> I) -> Choice {
        /// In rows, some whole tiles: where the second part may begin.
        const MULTIPLES: [usize; 3] = [512, 256, 128];
        let form = self.form(whole())?;
        let one = Part { sizes: *self, form };
        let (mut best, mut least) = ((one, None), one.cost());
        let parts_of = |rows, scratch| {
            // Whatever their number: they are some of more.
            let sizes = Sizes {
                rows,
                least_rows: 1,
                scratch,
                ..*self
            };
            // The fastest by itself, and the one that leaves or finds room beside the other.
            let forms = [sizes.form(whole()), sizes.form_of_whole_tiles(whole())];
            forms
                .into_iter()
                .flatten()
                .map(move |form| Part { sizes, form })
        };
        for multiple in MULTIPLES {
            let rows = self.rows / multiple * multiple;
            if rows == 0 || rows == self.rows {
                continue;
            }
            for first in parts_of(rows, self.scratch) {
                // They run at the same time.
                let scratch = self.scratch - Sizes::shares_bytes(first.form);
                for rest in parts_of(self.rows - rows, scratch) {
                    let cost = first.cost() + rest.cost_behind(&first) + OF_TWO;
                    if cost < least {
                        (best, least) = ((first, Some(rest)), cost);
                    }
                }
            }
        }
        Some(best)
    }
}

impl Part {
    fn cost(&self) -> usize {
        self.sizes.cost(self.form)
    }

    /// Whether multiprocessors that have none of another part's last round take all tiles of this one meanwhile.
    pub fn runs_beside(&self, first: &Part) -> bool {
        if first.form.shares != 0 || self.form.shares != 0 || self.form.parts != 1 {
            return false;
        }
        let at_once = first.sizes.at_once(first.form);
        let (blocks, of_round) = first.blocks();
        let idle = (at_once - blocks % at_once) % at_once;
        let idle = idle * self.sizes.multiprocessors / at_once;
        let (blocks, mine) = self.blocks();
        // Two of a multiprocessor are slower than one, which is what a round of few tiles has.
        let shared = match self.form.blocks == 2 && self.sizes.is_alone(self.form) {
            true => mine * 17 / 10,
            false => mine,
        };
        blocks <= idle * self.form.blocks * (of_round / shared.max(1))
    }

    /// Nanoseconds that it takes once the part has ended behind which it is launched.
    fn cost_behind(&self, first: &Part) -> usize {
        match self.runs_beside(first) {
            true => 0,
            false => self.cost(),
        }
    }

    /// Of whole tiles: blocks, and nanoseconds of a round of these.
    fn blocks(&self) -> (usize, usize) {
        let blocks = self.sizes.tiles(self.form) * self.form.parts;
        let rounds = blocks.div_ceil(self.sizes.at_once(self.form));
        (blocks, self.cost() / rounds.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::super::form::Of;
    use super::super::form::tests::{sizes, whole};

    /// What is left behind whole tiles is a part of its own where it would be most of a round of tiles.
    #[test]
    fn rows_are_parted_where_tiles_would_be_empty() {
        for (shape, expected) in [
            ((512, 4096, 14336), (512, None)),
            ((535, 4096, 14336), (512, Some(23))),
            ((1024, 4096, 14336), (1024, None)),
            ((535, 14336, 4096), (512, Some(23))),
            ((535, 28672, 4096), (512, Some(23))),
            ((768, 14336, 4096), (768, None)),
            ((2048, 14336, 4096), (2048, None)),
        ] {
            let (rows, n, k) = shape;
            let of = sizes(Of::Blocks, rows, n, k);
            let (first, rest) = of.parts(|| whole(of)).unwrap();
            let found = (first.sizes.rows, rest.map(|rest| rest.sizes.rows));
            assert_eq!(found, expected, "{shape:?}");
        }
    }
}
