//! Decisions drawn from the fuzzer's bytes. When these run out every answer is the first or the least: what is sound.

pub struct Input<'a> {
    bytes: &'a [u8],
}

impl<'a> Input<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Input { bytes }
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        match self.bytes.split_first() {
            Some((&first, rest)) => {
                self.bytes = rest;
                first
            }
            None => 0,
        }
    }

    pub fn word(&mut self) -> u64 {
        (0..8).fold(0, |word, _| word << 8 | u64::from(self.byte()))
    }

    /// True one time in `n`, at most 256.
    pub fn one_in(&mut self, n: u32) -> bool {
        u32::from(self.byte()) * n > 255 * (n - 1)
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::from(self.byte()) % from.len()]
    }

    pub fn up_to(&mut self, most: i64) -> i64 {
        i64::from(self.byte()) % (most + 1)
    }

    /// A number that someone may get wrong.
    pub fn number(&mut self) -> i64 {
        match self.byte() % 8 {
            0 => 0,
            1 => -1,
            2 => i64::MAX,
            3 => i64::MIN,
            4 => 1 << self.up_to(62),
            5 => self.word() as i64,
            _ => self.up_to(40),
        }
    }

    pub fn float(&mut self) -> f32 {
        match self.byte() % 8 {
            0 => 0.0,
            1 => -1.0,
            2 => f32::NAN,
            3 => f32::INFINITY,
            4 => f32::from_bits(self.word() as u32),
            _ => f32::from(self.byte()) / 16.0,
        }
    }
}
