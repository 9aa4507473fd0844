//! GPU architectures.

use std::env;

use crate::Error;

/// Ampere, its consumer and Ada relatives, Hopper with its own instructions, and both Blackwells.
const DEFAULT_ARCHITECTURES: &str = "80,86,89,90a,100,120";

/// A GPU architecture, such as `90a`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Architecture {
    /// Major times ten plus minor.
    pub number: u32,
    /// `a` or `f` for code that only this architecture, or its family, runs; empty otherwise.
    pub suffix: String,
}

impl Architecture {
    fn parse(text: &str) -> Result<Architecture, Error> {
        let digits = text.trim_end_matches(['a', 'f']);
        let number = digits.parse().ok().filter(|n| (70..=999).contains(n));
        let suffix = &text[digits.len()..];
        match number {
            Some(number) if suffix.len() <= 1 => Ok(Architecture {
                number,
                suffix: suffix.to_string(),
            }),
            _ => Err(Error::Architecture(text.to_string())),
        }
    }

    /// As in `sm_90a`.
    pub fn name(&self) -> String {
        format!("{}{}", self.number, self.suffix)
    }

    /// As in "compute capability 9.0".
    pub fn capability(&self) -> String {
        format!("{}.{}", self.number / 10, self.number % 10)
    }
}

/// The architectures to compile for: `UNSLOTH_CUDA_ARCHS`, or the default list; ascending.
///
/// # Errors
/// The variable is malformed or empty.
pub fn architectures() -> Result<Vec<Architecture>, Error> {
    let list = env::var("UNSLOTH_CUDA_ARCHS").unwrap_or_else(|_| DEFAULT_ARCHITECTURES.into());
    parse_architectures(&list)
}

fn parse_architectures(list: &str) -> Result<Vec<Architecture>, Error> {
    let mut archs = list
        .split([',', ';', ' '])
        .filter(|part| !part.is_empty())
        .map(Architecture::parse)
        .collect::<Result<Vec<_>, _>>()?;
    archs.sort_by_key(|arch| (arch.number, arch.suffix.clone()));
    archs.dedup();
    if archs.is_empty() {
        return Err(Error::Architecture(list.to_string()));
    }
    Ok(archs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_are_checked() {
        let names = |list| {
            parse_architectures(list)
                .map(|archs| archs.iter().map(Architecture::name).collect::<Vec<_>>())
                .map_err(|error| error.to_string())
        };
        assert_eq!(
            names("120, 90a;80"),
            Ok(vec!["80".into(), "90a".into(), "120".into()])
        );
        assert_eq!(Architecture::parse("120").unwrap().capability(), "12.0");
        for bad in ["", "9.0", "sm_90", "90x", "90aa", "8", "a"] {
            let error = names(bad).unwrap_err();
            assert!(error.contains(&format!("contains {bad:?}")), "{error}");
        }
    }
}
