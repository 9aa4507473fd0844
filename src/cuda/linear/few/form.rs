//! How products of few rows are parted.

use crate::cuda::images::linear_few::Choices;

/// Slots of the ring, at most: for each a lane of a warp that copies makes barriers.
const MOST_SLOTS: usize = 32;
/// Of the weight, on their way to a block once its ring has been full: with as many as it has room for, a layer of
/// decoding took 3 to 5 % longer, with half as many 32 % (H200).
const BYTES_IN_FLIGHT: usize = 64 << 10;
/// Of a ring of a weight of 16 bits, at least; half as many where blocks part rows.
const LEAST_SLOTS: usize = 8;
/// Of a ring of a weight in blocks, whose slots have other sizes in each format.
const LEAST_BYTES: usize = 48 << 10;

/// How a product is parted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub clusters: usize,
    /// Blocks of a cluster, which part rows.
    pub parts: usize,
    /// Of the output.
    pub columns_of_tile: usize,
    /// Of a cluster, but for the first ones, which have one more.
    pub tiles: usize,
    pub one_more: usize,
    /// Whether tiles are copied as they lie.
    pub whole_tiles: bool,
    /// Of a block's part of a row of the weight.
    pub steps: usize,
    /// Of 32 neighbours, of weights in blocks.
    pub units_of_step: usize,
    pub steps_of_chunk: usize,
    pub slots: usize,
    /// Chunks that are on their way for a team, once the ring has been full.
    pub in_flight: usize,
    pub pitch: usize,
    pub shared_bytes: usize,
}

/// What a form depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub rows: usize,
    pub out_features: usize,
    pub in_features: usize,
    pub gated: bool,
    /// Weights of a block, or 1.
    pub block_len: usize,
    /// Of a row of the weight, where tiles in blocks are copied as they lie.
    pub tile_row_bytes: Option<usize>,
    pub multiprocessors: usize,
    /// Whether blocks have clusters.
    pub clusters: bool,
    pub room: usize,
    pub choices: Choices,
}

/// How a block's part of a row is.
struct OfRow {
    /// Elements of a step.
    step: usize,
    steps: usize,
    steps_of_chunk: usize,
    /// Of a chunk.
    bytes: usize,
    pitch: usize,
}

impl Sizes {
    /// None where rows are too many or too long for a ring of enough slots.
    pub fn form(&self) -> Option<Form> {
        /// Which are counted in 32 bits.
        const MOST_COLUMNS: usize = 1 << 31;
        /// Elements of `x` in a block: two blocks part what has more, if they can.
        const MOST_OF_X: usize = 48 << 10;
        if !(1..=MOST_COLUMNS).contains(&self.out_features) || self.in_features == 0 {
            return None;
        }
        let parts = self.clusters && self.tile_row_bytes.is_none();
        let x = self.rows.checked_mul(self.in_features)?;
        let order: &[usize] = match (self.in_blocks(), parts, x > MOST_OF_X) {
            // Other kernels part these.
            (false, true, true) if self.choices.in_parts == 0 => &[],
            (false, true, _) if self.choices.in_parts != 0 => &[2],
            (false, _, _) => &[1],
            (true, false, _) => &[1],
            (true, true, false) => &[1, 2, 4],
            (true, true, true) => &[2, 1, 4],
        };
        order.iter().find_map(|parts| self.parted(*parts))
    }

    fn in_blocks(&self) -> bool {
        self.block_len != 1
    }

    fn parted(&self, parts: usize) -> Option<Form> {
        /// Bytes of a transaction barrier.
        const BARRIER: usize = 8;
        let choices = &self.choices;
        let [columns, teams] = [choices.columns, choices.teams].map(|choice| choice as usize);
        // Multiprocessors are in groups, which clusters do not cross and larger ones do not fill.
        let clusters = match parts {
            1 | 2 => self.multiprocessors / parts,
            _ => self.multiprocessors * 7 / 8 / parts,
        };
        let clusters = clusters.max(1);
        let columns_of_tile = self.columns_of_tile(clusters)?;
        let tiles = self.out_features.div_ceil(columns_of_tile);
        let clusters = clusters.min(tiles);
        let row = self.of_row(parts)?;
        let chunks = row.steps.div_ceil(row.steps_of_chunk);
        let of_slot = columns * row.pitch + 2 * BARRIER;
        let of_x = (row.steps.checked_mul(row.step * 2)?)
            .checked_add(choices.share_bytes as usize)?
            .checked_mul(self.rows)?;
        let sums = (row.steps * row.step).checked_mul(choices.sum_bytes as usize)?;
        let sums = sums / choices.step as usize;
        let own_tiles = match parts {
            1 => 0,
            _ => (tiles / clusters + 1).div_ceil(parts),
        };
        let partials = own_tiles * (parts * choices.partial_bytes as usize + BARRIER);
        let rest = of_x.checked_add(sums)?.checked_add(partials)? + 2 * BARRIER;
        let slots = (self.room.checked_sub(rest)? / of_slot).min(MOST_SLOTS) / teams * teams;
        let of_team = BYTES_IN_FLIGHT.div_ceil((teams * columns * row.bytes).max(1));
        let least = match self.in_blocks() {
            // As many as there are, if they are few; of each team one on its way, and one that it has.
            true => (LEAST_BYTES.div_ceil(columns * row.bytes))
                .max(2 * teams)
                .min((tiles / clusters + 1) * chunks)
                .next_multiple_of(teams),
            false if parts == 1 => LEAST_SLOTS,
            false => LEAST_SLOTS / 2,
        };
        (slots >= least).then_some(Form {
            clusters,
            parts,
            columns_of_tile,
            tiles: tiles / clusters,
            one_more: tiles % clusters,
            whole_tiles: self.tile_row_bytes.is_some(),
            steps: row.steps,
            units_of_step: row.step / 32,
            steps_of_chunk: row.steps_of_chunk,
            slots,
            in_flight: of_team.clamp(1, (slots / teams).max(1)),
            pitch: row.pitch,
            shared_bytes: rest + slots * of_slot,
        })
    }

    /// Tiles that are copied as they lie have eight rows or sixteen, all of which are there.
    fn columns_of_tile(&self, clusters: usize) -> Option<usize> {
        let columns = self.choices.columns as usize;
        let most = if self.gated { columns / 2 } else { columns };
        let even = most.min(self.out_features.div_ceil(clusters));
        if self.tile_row_bytes.is_none() {
            return Some(even);
        }
        let eight = columns / 2;
        let whole = if even <= eight { eight } else { most };
        [whole, eight]
            .into_iter()
            .find(|columns| self.out_features.is_multiple_of(*columns))
    }

    fn of_row(&self, parts: usize) -> Option<OfRow> {
        /// The same words of two neighbouring rows of a slot lie in different banks.
        const BANKS: usize = 128;
        /// That the copy engine takes.
        const LINE: usize = 16;
        let [step, step_bytes, most_steps] = [
            self.choices.step,
            self.choices.step_bytes,
            self.choices.steps,
        ]
        .map(|choice| choice as usize);
        if let Some(bytes) = self.tile_row_bytes {
            // Each warp of a team has a part of the row, of whole blocks; all together an even number of units.
            let of_warp = self.in_features.div_ceil(most_steps);
            let of_warp = of_warp.next_multiple_of(self.block_len.max(32));
            let steps = self.in_features.div_ceil(of_warp);
            let steps = match (of_warp / 32).is_multiple_of(2) {
                true => steps,
                false => steps.next_multiple_of(2),
            };
            return (of_warp <= step && steps <= most_steps).then_some(OfRow {
                step: of_warp,
                steps,
                steps_of_chunk: steps,
                bytes,
                pitch: bytes,
            });
        }
        let all = self.in_features.div_ceil(step);
        let mut steps = all.div_ceil(parts);
        // Each part begins with a line.
        while parts != 1 && !(steps * step_bytes).is_multiple_of(LINE) {
            steps += 1;
        }
        // As many in each chunk, so that warps have as much to do.
        let mut steps_of_chunk = steps.div_ceil(steps.div_ceil(most_steps));
        if !(steps_of_chunk * step_bytes).is_multiple_of(LINE) {
            steps_of_chunk = most_steps;
        }
        if all <= (parts - 1) * steps {
            return None;
        }
        let bytes = steps_of_chunk.checked_mul(step_bytes)?;
        let pitch = match self.in_blocks() {
            // An odd number of lines.
            true => {
                bytes / LINE * LINE
                    + if (bytes / LINE).is_multiple_of(2) {
                        LINE
                    } else {
                        0
                    }
            }
            false => bytes.next_multiple_of(BANKS) + BANKS / 2,
        };
        Some(OfRow {
            step,
            steps,
            steps_of_chunk,
            bytes,
            pitch,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    /// Of one row on an H200.
    fn sizes(out_features: usize, in_features: usize) -> Sizes {
        Sizes {
            rows: 1,
            out_features,
            in_features,
            gated: false,
            block_len: 1,
            tile_row_bytes: None,
            multiprocessors: 132,
            clusters: true,
            room: 227 << 10,
            choices: Choices {
                dtype: DType::Bf16 as u32,
                weight_dtype: DType::Bf16 as u32,
                rows: 8,
                in_parts: 0,
                columns: 16,
                step: 64,
                step_bytes: 128,
                steps: 8,
                teams: 2,
                sum_bytes: 0,
                share_bytes: 2048,
                partial_bytes: 512,
            },
        }
    }

    /// By the kernel that parts rows.
    fn in_parts(sizes: Sizes) -> Sizes {
        let choices = Choices {
            in_parts: 1,
            ..sizes.choices
        };
        Sizes { choices, ..sizes }
    }

    /// By Q4_0.
    fn blocks(rows: usize, out_features: usize, in_features: usize) -> Sizes {
        let of_floats = sizes(out_features, in_features);
        Sizes {
            rows,
            block_len: 32,
            choices: Choices {
                weight_dtype: DType::Q4_0 as u32,
                in_parts: 1,
                step: 256,
                step_bytes: 144,
                sum_bytes: 512,
                ..of_floats.choices
            },
            ..of_floats
        }
    }

    /// Every column is in a tile of a block, and shared memory is there.
    #[test]
    fn forms_cover_their_products() {
        for in_features in [8, 72, 576, 4096, 14336, 28672] {
            for out_features in [1, 15, 133, 960, 4096, 14336, 128_256] {
                for (rows, gated) in [(1, false), (1, true), (4, false), (8, true)] {
                    let sizes = Sizes {
                        rows,
                        gated,
                        ..sizes(out_features, in_features)
                    };
                    let Some(form) = sizes.form().or_else(|| in_parts(sizes).form()) else {
                        // What a cluster's blocks send each other of so many columns takes too much room.
                        let x = rows * in_features;
                        let wide = x > 32_768 && out_features == 128_256;
                        assert!(x > 114_688 || wide, "{sizes:?}");
                        continue;
                    };
                    assert!(form.shared_bytes <= sizes.room, "{sizes:?} {form:?}");
                    assert!(
                        form.slots.is_multiple_of(2)
                            && (LEAST_SLOTS / form.parts..=MOST_SLOTS).contains(&form.slots),
                        "{form:?}"
                    );
                    assert_eq!(form.pitch % 128, 64, "{form:?}");
                    let most = if gated { 8 } else { 16 };
                    assert!((1..=most).contains(&form.columns_of_tile), "{form:?}");
                    assert!(
                        (1..=132).contains(&form.clusters) && form.tiles > 0,
                        "{form:?}"
                    );
                    let tiles = form.clusters * form.tiles + form.one_more;
                    let columns = tiles * form.columns_of_tile;
                    let is_covered = columns >= out_features;
                    assert!(
                        is_covered && columns < out_features + form.columns_of_tile,
                        "{form:?}"
                    );
                }
            }
        }
        assert_eq!(sizes(0, 4096).form(), None);
        assert_eq!(sizes(4096, 0).form(), None);
        assert_eq!(sizes(usize::MAX, 4096).form(), None);
        assert_eq!(sizes(4096, usize::MAX / 2).form(), None);
    }

    /// Every column is in a tile of a cluster, every neighbour in a step of a part, and shared memory is there.
    #[test]
    fn forms_of_blocks_cover_their_products() {
        for in_features in [256, 576, 2304, 4096, 8192, 14336, 14592, 28672] {
            for out_features in [1, 15, 576, 4096, 14336, 128_256] {
                for (rows, gated, tiles) in [
                    (2, false, false),
                    (8, true, false),
                    (8, false, true),
                    (4, false, false),
                    (3, true, true),
                ] {
                    let sizes = Sizes {
                        gated,
                        tile_row_bytes: tiles.then_some(in_features / 32 * 18),
                        ..blocks(rows, out_features, in_features)
                    };
                    let Some(form) = sizes.form() else {
                        let whole = !tiles || out_features.is_multiple_of(8);
                        let long = rows * in_features > 196_608 || tiles && in_features > 2048;
                        // What a cluster's blocks send each other of so many columns takes too much room.
                        let wide = rows * in_features > 48 << 10 && out_features == 128_256;
                        assert!(long || wide || !whole, "{sizes:?}");
                        continue;
                    };
                    assert!(form.shared_bytes <= sizes.room, "{sizes:?} {form:?}");
                    assert!(form.slots.is_multiple_of(2) && form.slots > 0, "{form:?}");
                    assert!(form.clusters * form.parts <= 132, "{form:?}");
                    let step = form.units_of_step * 32;
                    let part = form.steps * step;
                    assert!(part * form.parts >= in_features, "{sizes:?} {form:?}");
                    // Lines of a row exchange places by eights.
                    assert!((part / 8).is_multiple_of(8), "{sizes:?} {form:?}");
                    assert!((form.pitch / 16) % 2 == 1 || tiles, "{form:?}");
                    let tiles = form.clusters * form.tiles + form.one_more;
                    let columns = tiles * form.columns_of_tile;
                    let is_covered = columns >= out_features;
                    assert!(
                        is_covered && columns < out_features + form.columns_of_tile,
                        "{form:?}"
                    );
                }
            }
        }
        // Where there are no clusters, rows are not parted.
        let alone = Sizes {
            clusters: false,
            ..blocks(8, 4096, 14336)
        };
        assert_eq!(alone.form(), None);
    }

    /// Those that were measured.
    #[test]
    fn forms_are_those_that_were_measured() {
        let form = |n, k| {
            let form = sizes(n, k).form().unwrap();
            (form.clusters, form.columns_of_tile, form.slots)
        };
        assert_eq!(form(4096, 4096), (132, 16, 12));
        assert_eq!(form(4096, 14336), (132, 16, 10));
        assert_eq!(form(960, 576), (120, 8, 20));
        let form = |rows, n, k| {
            let form = blocks(rows, n, k).form().unwrap();
            (form.clusters, form.parts, form.slots)
        };
        assert_eq!(form(8, 14336, 4096), (132, 1, 6));
        assert_eq!(form(8, 4096, 14336), (66, 2, 4));
    }
}
