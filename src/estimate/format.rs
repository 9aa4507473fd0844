//! Bytes in words.

use std::fmt::Write;

use arrayvec::ArrayString;

/// A number of bytes for people: three significant digits and a binary unit (IEC 80000-13), such as
/// `"1.50 GiB"`, or `"640 B"`.
///
/// ```
/// use unsloth::estimate::format_bytes;
///
/// assert_eq!(format_bytes(1023), "1023 B");
/// assert_eq!(format_bytes(1536), "1.50 KiB");
/// assert_eq!(format_bytes(16_060_522_496), "15.0 GiB");
/// ```
pub fn format_bytes(bytes: u64) -> String {
    in_words(bytes).as_str().into()
}

/// The same without asking for memory.
pub(crate) fn in_words(bytes: u64) -> ArrayString<16> {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut words = ArrayString::new();
    // At most "1023 KiB" is written, which fits.
    if bytes < 1024 {
        let _ = write!(words, "{bytes} B");
        return words;
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // What would be shown as 1024 of a unit is 1.00 of the next.
    while value >= 1023.5 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = match value {
        v if v < 9.995 => 2,
        v if v < 99.95 => 1,
        _ => 0,
    };
    let _ = write!(words, "{value:.digits$} {}", UNITS[unit]);
    words
}

#[cfg(test)]
mod tests {
    use super::format_bytes;

    #[test]
    fn three_digits() {
        let cases = [
            (0, "0 B"),
            (1, "1 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (10_234, "9.99 KiB"),
            (10_235, "10.0 KiB"),
            (102_348, "99.9 KiB"),
            (102_349, "100 KiB"),
            (1_048_063, "1023 KiB"),
            (1_048_064, "1.00 MiB"),
            (1 << 30, "1.00 GiB"),
            (269_030_016, "257 MiB"),
            (u64::MAX, "16.0 EiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(format_bytes(bytes), text, "{bytes}");
        }
    }
}
